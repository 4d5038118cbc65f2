"""A model that is chosen by test data: a warning before round 0, and none where it is chosen by other data."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import pytest
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import Callback, EarlyStopping, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import FederatedCallback

KINDS = ("EarlyStopping", "ModelCheckpoint")


class Oddly(Net):
    """Logs its validation under names that say nothing, one of them when validation ends."""

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self.log("quality", self._loss(batch, "val"))

    def on_validation_epoch_end(self) -> None:
        self.log("late", 1.0)


class FirstRound(FederatedCallback):
    """Notes whether round 0 had begun when the warning came."""

    begun = False

    def on_round_start(self, *_: Any) -> None:
        self.begun = True


def chooser(kind: str, monitor: str, folder: Path) -> Callback:
    if kind == "ModelCheckpoint":
        return ModelCheckpoint(folder, monitor=monitor)
    return EarlyStopping(monitor, patience=99, check_on_train_epoch_end=monitor.startswith("federated"))


def messages(callback: Callback, data: FederatedDataModule, module: Net | None = None, **options: Any) -> list[str]:
    """The warnings of a fit about test data; they come before the first round."""
    saves, first, seen = isinstance(callback, ModelCheckpoint), FirstRound(), list[tuple[str, bool]]()
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        warnings.showwarning = lambda message, *_, **__: seen.append((str(message), first.begun))
        server = FederatedServer(FedAvg(), local_steps=1, seed=0)
        trainer = quiet_trainer(server, 2, callbacks=[callback, first], enable_checkpointing=saves, **options)
        trainer.fit(module or Net(), datamodule=data)
    found = [(text, begun) for text, begun in seen if "chooses by" in text]
    assert not any(begun for _, begun in found)
    return [text for text, _ in found]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"num_sanity_val_steps": 0}], ids=["sanity", "no sanity"])
def test_validation_that_reads_the_test_data_warns_once(kind: str, options: dict[str, Any], tmp_path: Path) -> None:
    (text,) = messages(chooser(kind, "val_loss", tmp_path), classification(), **options)
    assert text.startswith(f"{kind} chooses by 'val_loss', which is measured on the test data: the data have no")
    assert "val=0.1 of FederatedDataModule" in text
    assert 'set_split("val", ...)' in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("monitor", ["federated/test_loss", "federated/test_accuracy_worst"])
def test_a_metric_of_the_test_data_warns_even_if_there_are_validation_data(
    kind: str, monitor: str, tmp_path: Path
) -> None:
    (text,) = messages(chooser(kind, monitor, tmp_path), classification(val=0.2))
    assert text.startswith(f"{kind} chooses by '{monitor}', which is a metric of the test data.")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("monitor", ["quality", "late"])
def test_a_metric_of_validation_is_known_by_what_validation_logs(kind: str, monitor: str, tmp_path: Path) -> None:
    (text,) = messages(chooser(kind, monitor, tmp_path), classification(), Oddly())
    assert f"chooses by '{monitor}', which is measured on the test data" in text


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "monitor", ["val_loss", "federated/val_loss", "federated/val_accuracy_worst_decile", "federated/objective"]
)
def test_validation_and_training_data_do_not_warn(kind: str, monitor: str, tmp_path: Path) -> None:
    assert not messages(chooser(kind, monitor, tmp_path), classification(val=0.2))


@pytest.mark.parametrize("kind", KINDS)
def test_the_training_objective_does_not_warn_without_validation_data(kind: str, tmp_path: Path) -> None:
    assert not messages(chooser(kind, "federated/objective", tmp_path), classification())


def test_a_datamodule_with_its_own_validation_loader_does_not_warn(tmp_path: Path) -> None:
    class Own(FederatedDataModule):
        def val_dataloader(self) -> DataLoader[Any]:
            return DataLoader(self.client_dataset("c0"), batch_size=4)

    data = Own(classification().splits["train"], test=classification().splits["test"], batch_size=4)
    assert not messages(chooser("EarlyStopping", "val_loss", tmp_path), data)


def test_a_checkpoint_that_monitors_nothing_does_not_warn(tmp_path: Path) -> None:
    assert not messages(ModelCheckpoint(tmp_path, save_last=True), classification())


# -- metrics that are not measured in every round -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "options", "every", "refused"),
    [
        ("ModelCheckpoint", {}, 3, "reads 'federated/train_loss' every 1 rounds, .* every 3 rounds .*every_n_epochs=3"),
        ("ModelCheckpoint", {}, 0, r"evaluated never \(evaluate_every=0\). Use FederatedServer\(evaluate_every=1\)\.$"),
        ("ModelCheckpoint", {"every_n_epochs": 2}, 3, r"every 2 rounds, .* Use FederatedServer\(evaluate_every=2\)"),
        ("ModelCheckpoint", {"every_n_epochs": 3}, 3, None),
        ("ModelCheckpoint", {}, 1, None),
        ("EarlyStopping", {}, 2, "EarlyStopping reads 'federated/train_loss' every 1 rounds"),
    ],
)
def test_a_metric_that_is_read_more_often_than_measured_is_refused_before_round_0(
    kind: str, options: dict[str, Any], every: int, refused: str | None, tmp_path: Path
) -> None:
    """Lightning would fail after round 0, with advice about the module's log, or choose by an old value."""
    monitor, first = "federated/train_loss", FirstRound()
    callback = (
        ModelCheckpoint(tmp_path, monitor=monitor, **options) if kind != "EarlyStopping" else EarlyStopping(monitor)
    )
    server = FederatedServer(FedAvg(), local_steps=1, seed=0, evaluate_every=every)
    saves = kind == "ModelCheckpoint"
    trainer = quiet_trainer(server, 4, callbacks=[callback, first], enable_checkpointing=saves)
    if refused is None:
        trainer.fit(Net(), datamodule=classification(3))
        return
    with pytest.raises(ValueError, match=refused):
        trainer.fit(Net(), datamodule=classification(3))
    assert not first.begun
