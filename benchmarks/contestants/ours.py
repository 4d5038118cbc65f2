"""FedADMM through ``Trainer.fit`` with a ``FederatedServer``."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset
from workloads import Workload

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.models import MLP, FemnistCNN

ROUNDS = 10**6  # the driver ends the fit long before


class Rounds(pl.Callback):
    """A turn for every round."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self.turn = turn

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.turn()


def model(workload: Workload, log_train: bool) -> pl.LightningModule:
    if workload.model == "mlp":
        return MLP((60, workload.hidden, 10), lr=workload.lr, log_train=log_train)
    return FemnistCNN(lr=workload.lr, log_train=log_train)


def federation(workload: Workload) -> FederatedDataModule:
    clients = {i: TensorDataset(*map(torch.from_numpy, samples)) for i, samples in enumerate(workload.data())}
    return FederatedDataModule(clients, batch_size=workload.batch)


def run(workload: Workload, turn: Callable[[], None], threads: int, log_train: bool = False, **options: Any) -> None:
    torch.set_num_threads(threads)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning|torch")
    pl.seed_everything(0, verbose=False)
    server = FederatedServer(
        FedADMM(eta=workload.eta, start="local"),
        clients_per_round=workload.cohort,
        local_steps=workload.steps,
        evaluate_every=0,
        figure=False,
        **options,
    )
    trainer = pl.Trainer(
        max_epochs=ROUNDS,
        callbacks=[server, Rounds(turn)],
        accelerator="cpu",
        enable_progress_bar=False,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
    )
    trainer.fit(model(workload, log_train), datamodule=federation(workload))
