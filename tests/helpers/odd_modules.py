"""What tests of unusual modules share."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from helpers.modules import Net, classification, quiet_trainer
from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM


class Odd(Net):
    """In float64; subclasses say what is odd about them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.build()
        self.double()

    def build(self) -> None:
        pass

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.note(loss.detach(), *batch, batch_idx)
        return loss

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("train_loss", loss)


def data(clients: int = 4, **kwargs: Any) -> FederatedDataModule:
    plain = classification(clients, **kwargs)
    for split in plain.splits.values():
        for cid, dataset in split.items():
            assert isinstance(dataset, TensorDataset)
            split[cid] = TensorDataset(dataset.tensors[0].double(), dataset.tensors[1])
    return plain


def fit(kind: Any, *callbacks: pl.Callback, **kwargs: Any) -> tuple[Tensor, dict[str, float]]:
    options = {"local_steps": 3, "seed": 3, "evaluate_every": 0, "figure": False, "engine": "sequential"}
    algorithm: Algorithm = kwargs.pop("algorithm", FedADMM(eta=0.5))
    trainer_options, own_data = kwargs.pop("trainer", {}), kwargs.pop("data", None) or data()
    server = FederatedServer(algorithm, **{**options, **kwargs})
    trainer = quiet_trainer(server, 2, callbacks=list(callbacks), **trainer_options)
    trainer.fit(kind(), datamodule=own_data)
    assert server.federation is not None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "federated/seconds"}
    return server.federation.server.x_bar, logged


def assert_same(expected: tuple[Tensor, dict[str, float]], found: tuple[Tensor, dict[str, float]]) -> None:
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-10)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


class ReadsAMetric(Odd):
    def build(self) -> None:
        self.mean = MeanMetric()

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.mean.update(loss)
        self.log("mean", self.mean.compute())


class KeepsAWindow(Odd):
    def build(self) -> None:
        self.window = deque([1.0], maxlen=2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.window.append(self.window[-1] + 0.1)
        return super().loss(x, y) * self.window[0]


class Wide(Odd):
    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.wide, self.last = nn.Linear(6, 520), nn.Linear(520, 520), nn.Linear(520, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.wide(torch.tanh(self.first(x)))))


class Listener(pl.Callback):
    """Has to be called, so that Lightning's own loop makes the steps."""

    def on_after_backward(self, *_: Any) -> None:
        pass
