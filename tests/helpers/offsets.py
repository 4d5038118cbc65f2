"""Least squares with a shared w and a personal offset: as a module, as data, and as a reference in a few lines."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.sampling import Uniform

CLIENTS, D, LR, STEPS, ROUNDS, SEED = 5, 3, 0.1, 3, 6, 7
COHORT = Uniform(2)


class Offsets(pl.LightningModule):
    """f_i(w, b) = |X_i w + b - y_i|^2 / (2 N_i), by full gradient steps."""

    def __init__(self, lr: float = LR) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.linspace(-1, 1, D, dtype=torch.float64))
        self.head = nn.ParameterDict({"b": nn.Parameter(torch.tensor(0.25, dtype=torch.float64))})
        self.lr = lr

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        return 0.5 * (x @ self.w + self.head["b"] - y).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


def offsets(clients: int = CLIENTS, batch_size: int = 100) -> FederatedDataModule:
    """Client i holds 6 + i samples, in one batch, and its answers are shifted by 3 i."""
    g = torch.Generator().manual_seed(0)
    train = {}
    for i in range(clients):
        x = torch.randn(6 + i, D, generator=g, dtype=torch.float64)
        train[f"c{i}"] = TensorDataset(x, x.sum(1) + 3 * i + torch.randn(6 + i, generator=g, dtype=torch.float64))
    return FederatedDataModule(train, batch_size=batch_size)


def slopes(data: FederatedDataModule, cid: Any, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    """Derivatives of f_i by w and by b."""
    x, y = data.client_dataset(cid).tensors
    rest = x @ w + b - y
    return x.T @ rest / len(y), rest.mean()


@dataclass
class Reference:
    """FedAvg with equal weights or, given eta, FedADMM: joint local gradient steps, of which only w is shared."""

    eta: float | None = None
    w: Tensor = field(default_factory=lambda: torch.linspace(-1, 1, D, dtype=torch.float64))
    b: dict[Any, Tensor] = field(default_factory=dict)
    z: dict[Any, Tensor] = field(default_factory=dict)
    x_hat: dict[Any, Tensor] = field(default_factory=dict)

    def run(self, data: FederatedDataModule, rounds: int = ROUNDS) -> Reference:
        ids, first = data.client_ids, self.w
        self.x_hat = dict.fromkeys(ids, first)
        self.z = {cid: torch.zeros_like(first) for cid in ids}
        self.b = {cid: torch.tensor(0.25, dtype=torch.float64) for cid in ids}
        for k in range(rounds):
            cohort = [ids[i] for i in COHORT.cohort(len(ids), SEED, k)]
            ends = [self.visit(data, cid) for cid in cohort]
            if self.eta is None:
                self.w = sum(ends) / len(ends)
            else:
                self.w = sum(self.x_hat.values()) / len(ids)
        return self

    def visit(self, data: FederatedDataModule, cid: Any) -> Tensor:
        w, b, eta = self.w, self.b[cid], self.eta or 0.0
        for _ in range(STEPS):
            of_w, of_b = slopes(data, cid, w, b)
            w, b = w - LR * (of_w + self.z[cid] + eta * (w - self.w)), b - LR * of_b
        self.b[cid] = b
        if self.eta is not None:
            self.z[cid] = self.z[cid] + eta * (w - self.w)
            self.x_hat[cid] = w + self.z[cid] / eta
        return w
