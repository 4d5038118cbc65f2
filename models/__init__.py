"""Ordinary LightningModules: nothing in them knows about federation."""

from lightning_fed.models.femnist_cnn import FemnistCNN
from lightning_fed.models.mlp import MLP

__all__ = ["MLP", "FemnistCNN"]
