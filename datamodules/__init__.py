"""Federated datasets, ready to train on."""

from lightning_fed.datamodules.femnist import FEMNIST
from lightning_fed.datamodules.leaf import Leaf
from lightning_fed.datamodules.synthetic import Synthetic
from lightning_fed.datamodules.vision import Vision

__all__ = ["FEMNIST", "Leaf", "Synthetic", "Vision"]
