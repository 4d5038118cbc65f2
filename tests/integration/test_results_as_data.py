"""``server.history`` and ``server.clients``."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM


def server() -> FederatedServer:
    return FederatedServer(FedADMM(eta=1.0), local_steps=2, seed=1)


class LogsLate(Net):
    def on_train_epoch_end(self) -> None:
        self.log("late", float(self.current_epoch))


def test_the_history_has_what_the_module_logs_when_the_round_ends() -> None:
    kept = server()
    quiet_trainer(kept, 3).fit(LogsLate(), datamodule=classification())
    assert [row["late"] for row in kept.history] == [0, 1, 2]
    assert {"train_loss", "val_loss", "federated/objective"} <= set(kept.history.columns)


def test_the_history_goes_on_after_a_resume(tmp_path: Path) -> None:
    def fit(rounds: int, ckpt_path: str | None = None) -> FederatedServer:
        kept, save = server(), ModelCheckpoint(tmp_path, save_last=True)
        trainer = quiet_trainer(kept, rounds, callbacks=[save], enable_checkpointing=True)
        trainer.fit(LogsLate(), datamodule=classification(), ckpt_path=ckpt_path)
        return kept

    first = fit(2)
    resumed = fit(4, "last")
    assert resumed.history[:2] == first.history
    assert resumed.history.column("round") == [0, 1, 2, 3]
    assert resumed.history.column("late") == [0, 1, 2, 3]


def test_rows_of_clients_agree_with_the_means_over_them() -> None:
    kept, data = server(), classification()
    quiet_trainer(kept, 2).fit(Net(), datamodule=data)
    rows, last = kept.clients, kept.history[-1]
    assert rows.column("client") == data.client_ids
    assert rows.column("samples") == [data.num_examples(cid) for cid in data.client_ids]
    assert rows.column("visits") == [2] * len(rows)
    mean = sum(row["samples"] * row["train_loss"] for row in rows) / sum(rows.column("samples"))
    assert mean == pytest.approx(last["federated/train_loss"])
    assert sum(rows.column("bytes_up")) == last["federated/bytes_up"]
    assert sum(rows.column("local_steps")) == last["federated/local_steps"]
    assert all(row["own_loss"] != row["test_loss"] for row in rows)


def test_a_callback_reads_the_round_that_has_just_been_played() -> None:
    class Reads(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            seen.append(kept.history[-1]["federated/objective"])

    seen: list[float] = []
    kept = server()
    quiet_trainer(kept, 2, callbacks=[Reads()]).fit(Net(), datamodule=classification())
    assert seen == kept.history.column("federated/objective")


def test_clients_before_a_fit_are_refused() -> None:
    with pytest.raises(ValueError, match="no results by client yet"):
        server().clients  # noqa: B018


# -- trainer.validate and trainer.test ------------------------------------------------------------------------------


def three_splits() -> FederatedDataModule:
    return classification(val=0.3)


def mean_of(rows: list[dict[str, Any]], data: FederatedDataModule, split: str, metric: str) -> float:
    sizes = {cid: len(data.client_dataset(cid, split)) for cid in data.split_ids(split)}
    return sum(sizes[row["client"]] * row[f"{split}_{metric}"] for row in rows) / sum(sizes.values())


def test_validation_data_have_their_columns_beside_those_of_training_and_test() -> None:
    kept, data = server(), three_splits()
    quiet_trainer(kept, 2).fit(Net(), datamodule=data)
    last = kept.history[-1]
    for split in ("train", "val", "test"):
        for metric in ("loss", "accuracy"):
            assert mean_of(kept.clients, data, split, metric) == pytest.approx(last[f"federated/{split}_{metric}"])
    spreads = {f"federated/{split}_loss_worst" for split in ("val", "test")}
    assert {name for name in last if name.endswith("loss_worst")} == spreads
    assert last["federated/val_loss"] == pytest.approx(last["val_loss"])  # Lightning's own, over all clients' data


@pytest.mark.parametrize("split", ["val", "test"])
def test_validate_and_test_have_results_by_client_that_agree_with_the_servers(split: str) -> None:
    kept, data, module = server(), three_splits(), Net()
    trainer = quiet_trainer(kept, 1)
    trainer.fit(module, datamodule=data)
    (found,) = (trainer.validate if split == "val" else trainer.test)(module, datamodule=data, verbose=False)
    rows = kept.clients
    assert mean_of(rows, data, split, "loss") == pytest.approx(found[f"{split}_loss"])
    assert mean_of(rows, data, split, "accuracy") == pytest.approx(found[f"{split}_acc"])
    assert rows.column("visits") == [1] * len(rows)
    assert not {name for name in rows.columns if name.startswith("test" if split == "val" else "val")}


@pytest.mark.parametrize("split", ["val", "test"])
def test_without_a_fit_a_checkpoint_gives_the_same_rows_by_client(split: str, tmp_path: Path) -> None:
    kept, data = server(), three_splits()
    fitted = quiet_trainer(kept, 2)
    fitted.fit(Net(), datamodule=data)
    fitted.save_checkpoint(tmp_path / "x.ckpt")
    fresh = server()  # as in a new process
    trainer, options = quiet_trainer(fresh), {"datamodule": three_splits(), "verbose": False}
    (trainer.validate if split == "val" else trainer.test)(Net(), ckpt_path=tmp_path / "x.ckpt", **options)
    name = f"{split}_loss"
    assert fresh.clients.column(name) == pytest.approx(kept.clients.column(name))
    assert fresh.clients.column("client") == data.client_ids
    assert fresh.history == kept.history


def test_a_test_by_client_leaves_the_fit_and_its_own_results_as_they_are() -> None:
    def final(tested: bool) -> tuple[pl.LightningModule, pl.Trainer]:
        module, data = Net(dropout=0.5, norm=True), classification()
        trainer = quiet_trainer(server(), 2)
        trainer.fit(module, datamodule=data)
        if tested:
            plain = quiet_trainer().test(module, datamodule=classification(), verbose=False)
            assert trainer.test(module, datamodule=data, verbose=False) == plain
            assert set(trainer.callback_metrics) == {"test_loss", "test_acc"}
        trainer.fit_loop.max_epochs = 4
        trainer.fit(module, datamodule=data)
        return module, trainer

    (with_it, _), (without, _) = final(True), final(False)
    assert all(torch.equal(a, b) for a, b in zip(with_it.parameters(), without.parameters(), strict=True))


def test_validation_without_validation_data_is_told_by_its_name() -> None:
    kept, data = server(), classification()
    quiet_trainer(kept).validate(Net(), datamodule=data, verbose=False)
    assert "test_loss" in kept.clients.columns
    assert not {name for name in kept.clients.columns if name.startswith("val")}


# -- other data, clients that left, several loaders -----------------------------------------------------------------


@pytest.mark.parametrize("clients", [2, 5])
def test_a_test_on_other_data_has_the_rows_of_their_clients(clients: int) -> None:
    kept, module = server(), Net()
    trainer = quiet_trainer(kept, 1)
    trainer.fit(module, datamodule=classification(3))
    other = classification(clients)
    trainer.test(module, datamodule=other, verbose=False)
    rows = kept.clients
    assert rows.column("client") == other.client_ids
    assert rows.column("samples") == [other.num_examples(cid) for cid in other.client_ids]
    assert rows.column("visits") == [1, 1, 1, 0, 0][:clients]
    assert all(row["test_loss"] > 0 for row in rows)


def test_a_client_that_was_expelled_after_the_evaluation_has_no_row() -> None:
    kept, data = server(), classification(3)
    quiet_trainer(kept, 1).fit(Net(), datamodule=data)
    kept.expel("c1")
    assert kept.clients.column("client") == ["c0", "c2"]


class TwoLoaders(FederatedDataModule):
    def val_dataloader(self) -> Any:
        return [self.test_dataloader(), self.test_dataloader()]


class ByLoader(Net):
    def validation_step(self, batch: list[torch.Tensor], batch_idx: int, dataloader_idx: int) -> None:
        self._loss(batch, f"val{dataloader_idx}")


def test_the_history_has_the_metrics_of_every_validation_loader() -> None:
    parts = classification().splits
    kept = server()
    data = TwoLoaders(parts["train"], test=parts["test"], batch_size=4)
    trainer = quiet_trainer(kept, 2)
    trainer.fit(ByLoader(), datamodule=data)
    names = {"val0_loss/dataloader_idx_0", "val1_loss/dataloader_idx_1"}
    assert names <= set(kept.history.columns)
    assert {name: kept.history[-1][name] for name in names} == {n: float(trainer.callback_metrics[n]) for n in names}
    assert mean_of(kept.clients, data, "test", "loss") == pytest.approx(kept.history[-1]["val0_loss/dataloader_idx_0"])


def test_results_of_clients_with_strange_ids_become_csv(tmp_path: Path) -> None:
    parts = classification(2).splits
    names = {"c0": "\udc80", "c1": 'a,"b"\nc'}
    kept = server()
    data = FederatedDataModule({names[cid]: part for cid, part in parts["train"].items()}, batch_size=4)
    quiet_trainer(kept, 1).fit(Net(), datamodule=data)
    kept.clients.to_csv(tmp_path / "clients.csv")
    with (tmp_path / "clients.csv").open(newline="", encoding="utf-8") as file:
        assert [row["client"] for row in csv.DictReader(file)] == ["\\udc80", 'a,"b"\nc']
