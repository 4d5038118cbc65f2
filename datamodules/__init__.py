"""Federated datasets, ready to train on."""

from lightning_fed.datamodules.femnist import FEMNIST
from lightning_fed.datamodules.synthetic import Synthetic

__all__ = ["FEMNIST", "Synthetic"]
