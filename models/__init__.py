"""Ordinary LightningModules, without code for federations."""

from lightning_fed.models.femnist_cnn import FemnistCNN
from lightning_fed.models.mlp import MLP

__all__ = ["MLP", "FemnistCNN"]
