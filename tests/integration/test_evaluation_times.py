"""When evaluation measures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
from helpers.evaluated import (
    rows_of,
    server,
    table_of,
)
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import EarlyStopping
from pytorch_lightning.loggers import CSVLogger

from lightning_fed.callbacks import ClientEvaluation


def evaluated_rounds(folder: Path, column: str = "federated/objective") -> list[int]:
    rows = rows_of(folder / "csv" / "version_0" / "metrics.csv")
    return [int(row["step"]) for row in rows if row.get(column)]


def test_every_n_rounds_and_the_last_round_are_evaluated(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), 7, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert evaluated_rounds(tmp_path) == [2, 5, 6]
    assert evaluated_rounds(tmp_path, "federated/local_loss") == list(range(7))


def test_the_last_round_by_max_steps_is_evaluated(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), -1, max_steps=4, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert evaluated_rounds(tmp_path) == [2, 3]


class StopAfter(pl.Callback):
    """Stops as EarlyStopping and Timer do: at the end of a round, without warning."""

    def __init__(self, rounds: int) -> None:
        self.rounds = rounds

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.global_step >= self.rounds


def test_the_last_round_of_a_fit_that_stops_early_is_evaluated(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), 9, callbacks=[StopAfter(5)], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert evaluated_rounds(tmp_path, "federated/local_loss") == list(range(5))
    assert evaluated_rounds(tmp_path) == [2, 4]


def test_a_fit_that_stops_early_has_a_table_of_its_last_round(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=3), 9, callbacks=[StopAfter(5)], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert {int(row["step"]) for row in table_of(tmp_path)} == {4}
    assert len(table_of(tmp_path)) == 4


def test_evaluation_can_be_switched_off(tmp_path: Path) -> None:
    trainer = quiet_trainer(server(evaluate_every=0), 2, logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert not any("objective" in name or "accuracy" in name for name in trainer.callback_metrics)
    assert "federated/primal_residual" not in trainer.callback_metrics
    assert "federated/dual_residual" in trainer.callback_metrics
    assert not (tmp_path / "csv" / "version_0" / "clients_table.csv").exists()


@pytest.mark.parametrize(("every", "table_every", "steps"), [(1, 2, {1, 3, 5, 6}), (2, 3, {2, 5, 6})])
def test_tables_come_every_n_rounds_and_at_the_end(
    every: int, table_every: int, steps: set[int], tmp_path: Path
) -> None:
    evaluation = ClientEvaluation(every_n_rounds=every, table_every_n_rounds=table_every)
    trainer = quiet_trainer(server(), 7, callbacks=[evaluation], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Net(), datamodule=classification())
    assert {int(row["step"]) for row in table_of(tmp_path)} == steps


def test_the_users_own_evaluation_replaces_the_default() -> None:
    evaluation = ClientEvaluation(every_n_rounds=2)
    trainer = quiet_trainer(server(evaluate_every=1), 1, callbacks=[evaluation])
    trainer.fit(Net(), datamodule=classification())
    assert [c for c in trainer.callbacks if isinstance(c, ClientEvaluation)] == [evaluation]


def test_callbacks_can_watch_what_evaluation_logs() -> None:
    stopping = EarlyStopping("federated/objective", patience=1, min_delta=100.0, check_on_train_epoch_end=True)
    trainer = quiet_trainer(server(), 9, callbacks=[stopping])
    trainer.fit(Net(), datamodule=classification())
    assert trainer.current_epoch == 2


@pytest.mark.parametrize("name", ["every_n_rounds", "table_every_n_rounds"])
@pytest.mark.parametrize("value", [0, -1, 1.5, True])
def test_wrong_intervals_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"ClientEvaluation\.{name} must be a whole number >= 1, got {value!r}"):
        ClientEvaluation(**{name: value})
