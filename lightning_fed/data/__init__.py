"""Clients' data: the datamodule, partitioners, loaders and a survey."""

from lightning_fed.data.augmented import Augmented, Transformed
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.tensor_loader import TensorRows, row_by_row

__all__ = ["Augmented", "FederatedDataModule", "TensorRows", "Transformed", "row_by_row"]
