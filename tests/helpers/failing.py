"""Federations of four clients in which some fail, and what such a fit leaves."""

from __future__ import annotations

import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor

from helpers.modules import Net, classification, quiet_trainer
from helpers.problems import MEANS
from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.sampling import Sampler

ROUNDS, BAD = 3, "c1"
ENGINES: dict[str, dict[str, Any]] = {
    "one by one": {"engine": "sequential"},
    "workers": {"engine": "sequential", "workers": 2},
    "stacked": {"engine": "vectorized", "compile": False},
    "in C": {"engine": "vectorized", "compile": True},
}


class Plain(Net):
    """A step without surprises, apart from clients whose data are slow."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.hparams.get("slow") and bool((batch[0] == 77).any()):
            time.sleep(0.3)
        return torch.nn.functional.nll_loss(self(batch[0]).log_softmax(1), batch[1])


class Slow(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.hparams["slow"] = True


def data_with(kind: str | None, clients: tuple[str, ...] = (BAD,)) -> FederatedDataModule:
    """A federation in which some clients are bad; with equal batches, so that clients may be stacked."""
    data = classification(4, drop_last=True)
    data.setup("fit")
    for cid in clients if kind else ():
        x, y = data.client_dataset(cid).tensors
        if kind == "raises":
            y.fill_(99)
        elif kind == "far":
            x.mul_(100)
        else:
            x.fill_({"nan": float("nan"), "inf": float("inf"), "slow": 77.0}[kind])
    return data


@dataclass(frozen=True)
class Without(Sampler):
    """Everybody but some."""

    away: tuple[int, ...] = (1,)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        return [i for i in range(n) if i not in self.away]

    def inclusion_probabilities(self, n: int) -> Any:
        return np.ones(n)


class Reports(FederatedCallback):
    reads_module = False

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.logged: list[dict[str, float]] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.all.append(report)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train")})


def server_of(policy: Any = "raise", algorithm: Any = None, **kwargs: Any) -> FederatedServer:
    settings = {"local_steps": 3, "seed": 4, "evaluate_every": 0, "figure": False, **kwargs}
    return FederatedServer(algorithm or FedADMM(eta=0.5), on_client_error=policy, **settings)


def fit(server: FederatedServer, data: FederatedDataModule, module: Any = None, **kwargs: Any) -> tuple[Any, Reports]:
    module, reports = module or Plain(), Reports()
    callbacks = [reports, *kwargs.pop("callbacks", [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Left out|Client .* failed in all|The loss of client")
        quiet_trainer(server, kwargs.pop("rounds", ROUNDS), callbacks=callbacks, **kwargs).fit(module, datamodule=data)
    return module, reports


def memory_of(server: FederatedServer) -> dict[str, Tensor]:
    """What the server and those clients that took part remember."""
    federation = server.federation
    found = {f"server.{name}": value for name, value in vars(federation.server).items()}
    found |= {f"buffers.{name}": value for name, value in federation.buffers.items()}
    for cid in federation.store:
        if federation.store[cid].visits:
            found |= {f"{cid}.{name}": value for name, value in vars(federation.store[cid].state).items()}
    return found


def assert_mean_of_shares(server: FederatedServer) -> None:
    federation = server.federation
    name = next(name for name in MEANS if hasattr(federation.server, name))
    weights, states = federation.weights, {cid: federation.recall(cid) for cid in federation.client_ids}
    mean = sum(weights[cid] * getattr(states[cid], MEANS[name]).double() for cid in weights) / sum(weights.values())
    torch.testing.assert_close(getattr(federation.server, name), mean, rtol=0, atol=1e-6)
