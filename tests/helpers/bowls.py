"""Quadratic clients as a LightningModule and data, with spectra to order."""

from __future__ import annotations

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule

SPECTRA = {"convex": [4.0, 1.0, 0.5, 0.1], "saddle": [2.0, 1.0, -0.5, -5.0], "tie": [3.0, 1.0, 0.0, -3.0]}


def symmetric(values: list[float], seed: int = 0) -> Tensor:
    q, _ = torch.linalg.qr(torch.randn(4, 4, generator=torch.Generator().manual_seed(seed), dtype=torch.float64))
    return q @ torch.diag(torch.tensor(values, dtype=torch.float64)) @ q.T


class Bowl(pl.LightningModule):
    """f_i(u, v) = mean over samples of x'Ax/2 - b'x with x = (u, v); a frozen parameter beside."""

    def __init__(self, lr: float = 0.1) -> None:
        super().__init__()
        self.u = nn.Parameter(torch.tensor([1.0], dtype=torch.float64))
        self.frozen = nn.Parameter(torch.ones(2, dtype=torch.float64), requires_grad=False)
        self.v = nn.Parameter(torch.tensor([2.0, -1.0, 0.5], dtype=torch.float64))
        self.lr = lr

    def x(self) -> Tensor:
        return torch.cat([self.u, self.v])

    def value(self, x: Tensor, A: Tensor, b: Tensor) -> Tensor:
        return (0.5 * torch.einsum("i,nij,j->n", x, A, x) - b @ x).mean()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.value(self.x(), *batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Slope(Bowl):
    """Linear: there is no curvature at all."""

    def value(self, x: Tensor, A: Tensor, b: Tensor) -> Tensor:
        return (b @ x).mean()


def bowls(*spectra: list[float], batch_size: int = 2) -> FederatedDataModule:
    """Client i's mean of A has spectrum i; its samples are unlike, in batches (evaluated in batches of 3)."""
    g = torch.Generator().manual_seed(1)
    datasets = []
    for i, values in enumerate(spectra):
        noise = torch.randn(5, 4, 4, generator=g, dtype=torch.float64)
        noise = noise + noise.mT
        A = symmetric(values, i) + noise - noise.mean(0)
        datasets.append(TensorDataset(A, torch.randn(5, 4, generator=g, dtype=torch.float64)))
    return FederatedDataModule(datasets, batch_size=batch_size, eval_batch_size=3)


class Bowls(FederatedDataModule):
    """The same for the command line."""

    def __init__(self, spectra: list[list[float]], batch_size: int = 5) -> None:
        super().__init__(batch_size=batch_size)
        self.spectra = spectra

    def setup(self, stage: str) -> None:
        self.set_split("train", bowls(*self.spectra).splits["train"])


class FixedBowl(Bowl):
    """Its learning rate is not in a config."""

    def __init__(self) -> None:
        super().__init__(lr=0.05)


class AdamBowl(Bowl):
    """Steps that are no plain gradient steps."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=self.lr)
