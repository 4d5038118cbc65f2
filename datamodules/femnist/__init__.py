"""Handwritten characters by writer, from LEAF and other sources."""

from lightning_fed.datamodules.femnist.femnist import FEMNIST

__all__ = ["FEMNIST"]
