"""One W&B run over fit, kill, resume and test: read back from what was written offline."""

from __future__ import annotations

import logging
import os
import signal
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import wandb
from helpers.modules import Net, classification, quiet_trainer
from helpers.wandb_reader import OfflineRun, read_parts, wandb_at
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import WandbLogger

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.core.server_part import RUNS
from lightning_fed.tracking import AutoWandbLogger

ROUNDS, KILLED = 4, 2


class Kill(FederatedCallback):
    """Ends its own process as the kernel would, when a round begins."""

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int, cohort: Any) -> None:
        if round == KILLED:
            os.kill(os.getpid(), signal.SIGKILL)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    wandb_at(monkeypatch, tmp_path)
    yield tmp_path
    wandb.finish()


def trainer(home: Path, *callbacks: pl.Callback, logger: Any = None, rounds: int = ROUNDS) -> pl.Trainer:
    server = FederatedServer(FedADMM(eta=2.0), clients_per_round=2, local_steps=1, seed=3, figure=False)
    save = ModelCheckpoint(home / "saved", save_last=True)
    logger = logger or AutoWandbLogger("test", str(home), "fit")
    return quiet_trainer(server, rounds, logger=logger, callbacks=[*callbacks, save], enable_checkpointing=True)


def fit(home: Path, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    fitted = trainer(home, *callbacks, **kwargs)
    fitted.fit(Net(), datamodule=classification(3), ckpt_path="last" if (home / "saved").exists() else None)
    return fitted


def evaluate(home: Path, checkpoint: str | None = "last", **kwargs: Any) -> None:
    trainer(home, **kwargs).test(Net(), datamodule=classification(3), ckpt_path=checkpoint, verbose=False)


def in_child(work: Callable[[], Any]) -> int:
    """Do work in a forked process; its exit status, or the negative number of the signal that ended it."""
    wandb.teardown()  # a child must not talk to the service of this process
    if (pid := os.fork()) == 0:
        status = 1
        try:
            work()
            wandb.finish()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def ids(home: Path) -> list[str]:
    return [part.id for part in read_parts(home)]


def steps(part: OfflineRun, key: str) -> list[int]:
    return list(part.series(key))


def test_one_run_goes_on_after_a_kill_and_in_a_test(home: Path) -> None:
    assert in_child(lambda: fit(home, Kill())) == -signal.SIGKILL
    assert in_child(lambda: fit(home)) == 0
    assert in_child(lambda: evaluate(home)) == 0
    first, second, third = parts = read_parts(home)
    assert len({part.id for part in parts}) == 1
    assert {second.name, third.name} == {"fit"}
    assert set(steps(first, "federated/objective")) <= set(range(KILLED))  # a kill may lose what W&B had not written
    assert steps(second, "federated/objective") == list(range(KILLED, ROUNDS))
    assert third.series("test_loss").keys() == {ROUNDS}, "the round of the checkpoint, not round 0"


def test_a_test_of_the_same_trainer_goes_on_in_the_run_also_when_it_was_finished(home: Path) -> None:
    fitted = fit(home, rounds=1)
    wandb.finish()
    fitted.test(Net(), datamodule=classification(3), verbose=False)
    wandb.finish()
    fit_part, test_part = read_parts(home, ended=True)
    assert fit_part.id == test_part.id
    assert "test_loss" in test_part.history[-1]


@pytest.mark.parametrize(
    "other",
    [{"project": "other"}, {"name": "other"}, {"id": "mine"}, {"resume": "never"}],
    ids=["project", "name", "id", "never"],
)
def test_another_project_name_or_id_is_another_run(home: Path, other: dict[str, str]) -> None:
    fit(home, rounds=1)
    wandb.finish()
    logger = AutoWandbLogger(**{"project": "test", "save_dir": str(home), "name": "fit", **other})
    evaluate(home, logger=logger)
    wandb.finish()
    old, new = ids(home)
    assert new != old
    assert new == other.get("id", new)


def test_a_checkpoint_from_elsewhere_starts_a_run(home: Path) -> None:
    (home / "foreign.ckpt").write_bytes(b"not a checkpoint")
    with pytest.raises(Exception, match="Weights only load failed"):
        evaluate(home, str(home / "foreign.ckpt"))
    wandb.finish()
    assert len(ids(home)) == 1


def test_the_checkpoint_names_the_run(home: Path) -> None:
    fitted = fit(home, rounds=1)
    saved = torch.load(home / "saved" / "last.ckpt", weights_only=True)
    assert saved[RUNS] == [{"id": fitted.logger.version, "project": "test", "name": "fit"}]


def test_a_stock_logger_is_told_how_to_continue(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    stock = {"project": "test", "save_dir": str(home), "offline": True}
    first = fit(home, logger=WandbLogger(**stock), rounds=1).logger.version
    wandb.finish()
    root = pl.__name__
    with caplog.at_level(logging.INFO, f"{root}.utilities.rank_zero"):
        second = fit(home, logger=WandbLogger(**stock), rounds=2).logger.version
    assert any(f'id="{first}"' in message and "AutoWandbLogger" in message for message in caplog.messages)
    wandb.finish()
    caplog.clear()
    with caplog.at_level(logging.INFO, f"{root}.utilities.rank_zero"):
        fit(home, logger=WandbLogger(**stock, id=second), rounds=3)
    assert not any("AutoWandbLogger" in message for message in caplog.messages)


def test_the_path_of_the_figure_is_printed(home: Path, caplog: pytest.LogCaptureFixture) -> None:
    logger = AutoWandbLogger("test", str(home), "fit")
    with caplog.at_level(logging.INFO, f"{pl.__name__}.utilities.rank_zero"):
        quiet_trainer(FederatedServer(FedADMM()), 1, logger=logger).fit(Net(), datamodule=classification(2))
    (told,) = [message for message in caplog.messages if message.startswith("Figure: ")]
    path = Path(told.removeprefix("Figure: "))
    assert path == home / "test" / logger.version / "federated_figure.png"
    assert path.read_bytes().startswith(b"\x89PNG")
