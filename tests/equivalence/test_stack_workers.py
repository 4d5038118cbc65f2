"""Stacks of clients trained in other processes give the bits of stacks trained in this one."""

from __future__ import annotations

import os
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from modules import Net, classification, quiet_trainer
from test_workers import check_same
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedAvg, FedDualAvg, FedLin, Scaffold
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.engines import DivergenceError
from lightning_fed.engines import vectorized as engine
from lightning_fed.transforms import TopK


class Talkative(Net):
    """Logs a number and a metric."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.log("train_loss", loss, batch_size=len(y))
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        return loss


@pytest.fixture(autouse=True)
def forks(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Stacks of two clients, and the processes that were made."""
    monkeypatch.setattr(engine, "STACK", 2)
    made: list[int] = []
    fork = os.fork

    def counted() -> int:
        pid = fork()
        made.append(pid)
        return pid

    monkeypatch.setattr(os, "fork", counted)
    return made


def fit(
    workers: int, algorithm: Algorithm, module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any
) -> tuple[FederatedServer, pl.Trainer]:
    server = FederatedServer(algorithm, workers=workers, engine="vectorized", local_steps=4, seed=5, **kwargs)
    trainer = quiet_trainer(server, 4, callbacks=list(callbacks))
    trainer.fit(module, datamodule=classification(5, batch_size=5))
    return server, trainer


@pytest.mark.parametrize(
    "algorithm",
    [FedADMM(eta=2.0), FedAvg(), Scaffold(1), FedLin(), FedDualAvg(), Compressed(FedADMM(), TopK(5))],
    ids=lambda algorithm: type(algorithm).__name__,
)
@pytest.mark.parametrize("optimizer", ["sgd", "momentum"])
def test_workers_give_the_same_bits(algorithm: Algorithm, optimizer: str, forks: list[int]) -> None:
    if algorithm.plain_sgd:
        optimizer = "sgd"
    one = fit(1, algorithm, Talkative(optimizer=optimizer))
    assert not forks
    assert {"train_loss", "train_acc"} <= one[1].callback_metrics.keys()
    check_same(one, fit(2, algorithm, Talkative(optimizer=optimizer)))
    assert forks


def test_the_first_round_is_played_here_and_the_others_by_two_processes(forks: list[int]) -> None:
    fit(2, FedADMM(), Talkative(), evaluate_every=0)
    assert len(forks) == 2 * 3


def test_what_a_child_has_recorded_is_recorded_here_in_the_next_round(forks: list[int]) -> None:
    class Changes(pl.Callback):
        """Another attribute of the module in round 2: steps have to be recorded anew."""

        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            pl_module.mood = float(trainer.current_epoch >= 1)

    fit(2, FedADMM(), Talkative(), Changes(), evaluate_every=0)
    assert len(forks) == 2 * 2  # rounds 1 and 3; round 2 was played here


def test_callbacks_are_told_here_and_in_order() -> None:
    class Told(FederatedCallback):
        def __init__(self) -> None:
            self.ends: list[Any] = []

        def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
            weights = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
            self.ends.append((os.getpid(), visit.round, visit.client, visit.step, torch.equal(weights, reply.x_i)))

    told = Told()
    fit(2, FedADMM(), Talkative(), told)
    assert told.ends == [(os.getpid(), round, f"c{i}", 4, True) for round in range(4) for i in range(5)]


def test_a_client_that_diverges_is_named_and_no_process_is_left(forks: list[int]) -> None:
    class Leaps(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 2:
                trainer.optimizers[0].param_groups[0]["lr"] = 1e30

    with pytest.raises(DivergenceError, match="round 2, client 'c0'"):
        fit(2, FedADMM(), Talkative(), Leaps(), evaluate_every=0)
    assert len(forks) == 4
    for pid in forks:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
