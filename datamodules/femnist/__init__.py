"""Handwritten characters by writer, from LEAF and other sources."""

from lightning_fed.datamodules.femnist.femnist import FEMNIST
from lightning_fed.datamodules.femnist.options import Pixels, Selection, Source, Split

__all__ = ["FEMNIST", "Pixels", "Selection", "Source", "Split"]
