"""``server.history`` and ``server.clients``."""

from __future__ import annotations

from pathlib import Path

import pytest
import pytorch_lightning as pl
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedServer
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
