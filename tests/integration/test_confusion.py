"""The glance at mistakes counts what was really predicted, on test data, by the server's model."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import quiet_trainer
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import Confusion


class Shifted(pl.LightningModule):
    """Takes every sample for the class that its only feature says; training changes nothing."""

    def __init__(self, classes: int = 4) -> None:
        super().__init__()
        self.layer = nn.Linear(1, 1)
        self.classes = classes

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.one_hot(x[:, 0].long(), self.classes).float() + 0 * self.layer(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return 0 * self.layer(batch[0]).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def data(seen: list[int], true: list[int]) -> FederatedDataModule:
    held = TensorDataset(torch.tensor(seen)[:, None].float(), torch.tensor(true))
    return FederatedDataModule([held, held], test=[held, held])


def fitted(confusion: Confusion, module: pl.LightningModule, federation: FederatedDataModule, **kwargs: object) -> None:
    server = FederatedServer(FedAvg(), local_steps=1, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[confusion], **kwargs).fit(module, datamodule=federation)


def test_rows_are_true_classes_and_columns_what_they_were_taken_for() -> None:
    confusion = Confusion()
    fitted(confusion, Shifted(), data(seen=[0, 1, 3, 3], true=[0, 1, 1, 1]))
    assert confusion.matrix is not None
    assert confusion.matrix.tolist() == [[2, 0, 0, 0], [0, 2, 0, 4], [0, 0, 0, 0], [0, 0, 0, 0]]
    assert confusion.mistakes() == [("1", "3", 4, 6)]


def test_classes_go_by_the_names_of_the_data_and_the_matrix_is_drawn(tmp_path: Path) -> None:
    confusion, federation = Confusion("glance/matrix.png", top=1), data(seen=[2, 2, 1], true=[0, 0, 2])
    federation.class_names = ["w", "x", "y", "z"]
    fitted(confusion, Shifted(), federation, logger=CSVLogger(tmp_path))
    assert confusion.mistakes() == [("w", "y", 4, 4)]
    assert Path("glance/matrix.png").stat().st_size > 5_000
    (table,) = tmp_path.rglob("confusion_table.csv")
    assert table.read_text().splitlines()[1] == "0,w,y,4,4"


def test_a_model_that_is_no_classifier_is_refused_with_the_reason() -> None:
    with pytest.raises(TypeError, match="Confusion needs module"):
        fitted(
            Confusion(),
            Shifted(),
            FederatedDataModule(
                [TensorDataset(torch.zeros(2, 1), torch.zeros(2))] * 2,
                test=[TensorDataset(torch.zeros(2, 1), torch.zeros(2))] * 2,
            ),
        )


def test_without_test_data_there_is_nothing_to_see() -> None:
    confusion = Confusion()
    fitted(confusion, Shifted(), FederatedDataModule([TensorDataset(torch.zeros(2, 1), torch.zeros(2).long())] * 2))
    assert confusion.matrix is None
    assert confusion.mistakes() == []
