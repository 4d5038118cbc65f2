"""Images by client, from any data set of torchvision."""

from lightning_fed.datamodules.vision.vision import Vision

__all__ = ["Vision"]
