"""Evaluation of whatever module and data there are."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.evaluated import (
    ACCURACY,
    Bare,
    Manual,
    ManualValidated,
    blank,
    metrics_of,
    server,
    table_of,
)
from helpers.modules import Net, Witness, classification, measured, quiet_trainer, x_of
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import R2Score

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import ClientEvaluation
from lightning_fed.engines import ClientError


def test_manual_optimisation_without_a_loss_is_trained_and_not_measured(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(), 2, logger=CSVLogger(tmp_path, "csv"))
    module = Manual()
    before = x_of(module)
    trainer.fit(module, datamodule=classification())
    assert not torch.equal(x_of(module), before)
    assert "federated/objective" not in trainer.callback_metrics
    assert "federated/local_loss" not in trainer.callback_metrics
    assert all(blank(row["train_loss"]) and blank(row["own_loss"]) for row in table_of(tmp_path))


def test_manual_optimisation_is_measured_by_its_validation_step() -> None:
    data, module = classification(), ManualValidated()
    trainer = quiet_trainer(server(), 2)
    trainer.fit(module, datamodule=data)
    expected = [measured(module.net, x_of(module), data.client_dataset(cid))[0] for cid in data.client_ids]
    assert metrics_of(trainer)["federated/objective"] == pytest.approx(sum(expected) / len(expected), rel=1e-6)


def test_a_gradient_mapping_without_a_loss_is_refused_before_the_first_local_step() -> None:
    module = Manual()
    steps: list[int] = []
    module.on_before_optimizer_step = lambda optimizer: steps.append(1)  # type: ignore[method-assign]
    trainer = quiet_trainer(server(), 1, callbacks=[ClientEvaluation(gradient_mapping=True)])
    with pytest.raises(ValueError, match="gradient_mapping") as error:
        trainer.fit(module, datamodule=classification())
    assert not isinstance(error.value, ClientError)
    assert not steps


def test_a_module_without_validation_step_is_measured_by_its_training_step() -> None:
    data, module = classification(), Bare()
    trainer = quiet_trainer(server(), 2)
    trainer.fit(module, datamodule=data)
    metrics = metrics_of(trainer)
    train = [measured(module.net, x_of(module), data.client_dataset(cid))[0] for cid in data.client_ids]
    test = [measured(module.net, x_of(module), data.client_dataset(cid, "test"))[0] for cid in data.client_ids]
    assert metrics["federated/objective"] == pytest.approx(sum(train) / 4, rel=1e-6)
    assert metrics["federated/test_loss"] == pytest.approx(sum(test) / 4, rel=1e-6)
    assert ACCURACY not in metrics


def test_validation_data_are_measured_where_there_are_no_test_data() -> None:
    splits = classification().splits
    data, module = FederatedDataModule(splits["train"], val=splits["test"], batch_size=4), Net()
    trainer = quiet_trainer(server(), 1)
    trainer.fit(module, datamodule=data)
    losses = [measured(Net(), x_of(module), data.client_dataset(cid, "val"))[0] for cid in data.client_ids]
    assert metrics_of(trainer)["federated/val_loss"] == pytest.approx(sum(losses) / 4, rel=1e-6)
    assert "federated/test_loss" not in trainer.callback_metrics


@pytest.mark.filterwarnings(
    "ignore:Total length of `list` across ranks is zero"
)  # Lightning, about nothing to validate
def test_data_without_anything_held_out_are_measured_on_training_data(tmp_path: Path) -> None:
    data, module, witness = FederatedDataModule(classification().splits["train"], batch_size=4), Net(), Witness()
    trainer = quiet_trainer(server(), 1, callbacks=[witness], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(module, datamodule=data)
    assert {name for name in trainer.callback_metrics if name.endswith("_accuracy")} == {"federated/train_accuracy"}
    for row in table_of(tmp_path):
        assert set(row) == {
            *("step", "client", "samples", "visits"),
            *("train_loss", "train_accuracy", "own_loss", "own_accuracy"),
            *("bytes_down", "bytes_up", "local_steps"),
        }
        if row["client"] in witness.x_i[-1]:
            own = measured(Net(), witness.x_i[-1][row["client"]], data.client_dataset(row["client"]))
            assert float(row["own_loss"]) == pytest.approx(own[0], rel=1e-6)


def test_a_metric_that_needs_more_samples_than_a_client_has_does_not_stop_the_fit() -> None:
    class Regression(Bare):
        def __init__(self) -> None:
            super().__init__()
            self.r2 = R2Score()

        def training_step(self, batch: list[Tensor]) -> Tensor:  # type: ignore[override]
            x, y = batch
            predicted = self.net(x)[:, 0]
            self.r2.update(predicted.detach(), y)
            self.log("r2", self.r2, on_step=False, on_epoch=True)
            return nn.functional.mse_loss(predicted, y)

    g = torch.Generator().manual_seed(0)
    datasets = [TensorDataset(torch.randn(n, 6, generator=g), torch.randn(n, generator=g)) for n in (1, 5, 9)]
    trainer = quiet_trainer(server(clients_per_round=None), 1)
    trainer.fit(Regression(), datamodule=FederatedDataModule(datasets, batch_size=4))
    assert {"r2", "federated/objective"} <= trainer.callback_metrics.keys()


def test_clients_without_test_data_are_left_out_of_its_mean(tmp_path: Path) -> None:
    splits = classification().splits
    some = {cid: splits["test"][cid] for cid in ("c1", "c3")}
    data, module = FederatedDataModule(splits["train"], test=some, batch_size=4), Net()
    trainer = quiet_trainer(server(clients_per_round=None), 1, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(module, datamodule=data)
    losses = {cid: measured(Net(), x_of(module), dataset)[0] for cid, dataset in some.items()}
    assert metrics_of(trainer)["federated/test_loss"] == pytest.approx(sum(losses.values()) / 2, rel=1e-6)
    assert [row["client"] for row in table_of(tmp_path) if blank(row["test_loss"])] == ["c0", "c2"]


class Wrapped(Dataset[Any]):
    """Samples that have to go through a DataLoader."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner

    def __len__(self) -> int:
        return len(self.inner)

    def __getitem__(self, index: int) -> Any:
        return self.inner[index]


def test_any_dataset_gives_the_same_numbers_as_tensors_in_memory() -> None:
    plain = classification()
    loaded = FederatedDataModule(
        {cid: Wrapped(dataset) for cid, dataset in plain.splits["train"].items()},
        test={cid: Wrapped(dataset) for cid, dataset in plain.splits["test"].items()},
        batch_size=4,
    )
    found = []
    for data in (plain, loaded):
        trainer = quiet_trainer(server(), 2)
        trainer.fit(Net(dropout=0.5), datamodule=data)
        found.append({k: v for k, v in metrics_of(trainer).items() if k != "federated/seconds"})
    assert found[0] == pytest.approx(found[1], rel=1e-6)


class Detector(pl.LightningModule):
    """As torchvision's detectors: losses in training mode, predictions in evaluation mode."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(6, 3)

    def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
        logits = self.layer(x)
        return {"classes": torch.nn.functional.cross_entropy(logits, y)} if self.training else list(logits)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return sum(self(*batch).values())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ValidatedDetector(Detector):
    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return torch.nn.functional.cross_entropy(torch.stack(self(batch[0])), batch[1])


@pytest.mark.parametrize(("kind", "measured"), [(Detector, False), (ValidatedDetector, True)])
def test_a_step_for_training_mode_only_is_evaluated_by_another_or_not_at_all(kind: Any, measured: bool) -> None:
    trainer = quiet_trainer(server(), 2, limit_val_batches=0)
    with pytest.warns(UserWarning, match=f"{kind.__name__}.training_step does not work in evaluation mode"):
        trainer.fit(kind(), datamodule=classification())
    assert trainer.global_step == 2
    assert ("federated/objective" in trainer.callback_metrics) == measured
