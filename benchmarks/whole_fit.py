"""What ``Trainer.fit`` adds to a round's local work, bare and with everything a real run has.

W1: the 60-32-10 perceptron, 10 of 30 clients, 300 steps of batch 2, compiled, one thread. The whole run logs to W&B
(offline), and evaluates and saves every 10 rounds. Usage: python benchmarks/whole_fit.py
"""

from __future__ import annotations

import logging
import os
import statistics
import tempfile
import time
import warnings
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP
from lightning_fed.tracking import AutoWandbLogger

ROUNDS, WARM_UP, REPEATS = 60, 10, 3


class Clock(pl.Callback):
    """Seconds of whole rounds, and of the local work in them."""

    def __init__(self) -> None:
        self.starts: list[float] = []
        self.work: list[float] = []

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append(time.perf_counter())

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.work.append(trainer.fit_loop.server.report.metrics["seconds"])

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.starts.append(time.perf_counter())

    @property
    def round(self) -> float:
        return (self.starts[ROUNDS] - self.starts[WARM_UP]) / (ROUNDS - WARM_UP)

    @property
    def local_work(self) -> float:
        return statistics.mean(self.work[WARM_UP:])


def fit(folder: str, whole: bool) -> Clock:
    clock = Clock()
    every = 10 if whole else 0
    server = FederatedServer(FedADMM(), 10, local_steps=300, evaluate_every=every, compile=True, figure=whole)
    extra: dict[str, Any] = {"logger": False, "enable_checkpointing": False}
    callbacks: list[pl.Callback] = [server, clock]
    if whole:
        extra = {"logger": AutoWandbLogger(save_dir=folder)}
        callbacks.append(ModelCheckpoint(folder, every_n_epochs=10))
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        callbacks=callbacks,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        default_root_dir=folder,
        **extra,
    )
    trainer.fit(MLP(log_train=False), datamodule=Synthetic())
    return clock


def main() -> None:
    torch.set_num_threads(1)
    os.environ.setdefault("WANDB_MODE", "offline")
    os.environ.setdefault("WANDB_SILENT", "true")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    runs: dict[bool, list[Clock]] = {False: [], True: []}
    for _ in range(REPEATS):
        for whole, clocks in runs.items():
            with tempfile.TemporaryDirectory() as folder:
                clocks.append(fit(folder, whole))
    work = statistics.median(clock.local_work for clock in runs[False])
    for whole, clocks in runs.items():
        seconds = statistics.median(clock.round for clock in clocks)
        name = "W&B, evaluation and checkpoint every 10 rounds" if whole else "bare"
        print(
            f"{name:48s} {seconds * 1e3:6.1f} ms a round, {seconds / work:4.2f}x its local work ({work * 1e3:.1f} ms)"
        )


if __name__ == "__main__":
    main()
