"""Learning under constraints
=============================

``g`` is the indicator of a set, and the server projects onto it.

Eight heterogeneous clients, three per round, against projected gradient on all data; and a LightningModule in a box.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import Exact, FederatedDataModule, FederatedServer, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedADMM
from lightning_fed.laboratory import History, Loss, Solver
from lightning_fed.partition import IID
from lightning_fed.prox import Box, Prox
from lightning_fed.sampling import Uniform
from lightning_fed.theory import gradient_mapping

X0 = torch.zeros(6, dtype=torch.float64)


class Constraint(Prox):
    """A custom ``g``: 0 inside a set, infinite outside; its prox is the projection."""

    indicator = True

    def __call__(self, x: Tensor) -> Tensor:
        return torch.where((self.prox(x, 1.0) - x).norm(dim=-1) <= 1e-12, 0.0, float("inf")).to(x)


@dataclass(frozen=True)
class Simplex(Constraint):
    """Entries >= 0 that sum to 1; the projection lowers all by the same amount and sets negative entries to 0."""

    def prox(self, v: Tensor, t: float) -> Tensor:
        ordered = v.sort(descending=True).values
        amounts = (ordered.cumsum(-1) - 1) / torch.arange(1, v.shape[-1] + 1).to(v)
        return (v - amounts.gather(-1, (ordered > amounts).sum(-1, keepdim=True) - 1)).clamp(min=0)


@dataclass(frozen=True)
class Ball(Constraint):
    """Norm <= radius; the projection moves points outside straight towards the origin."""

    radius: float = 1.0

    def prox(self, v: Tensor, t: float) -> Tensor:
        return v * (self.radius / v.norm(dim=-1, keepdim=True)).clamp(max=1)


@dataclass(frozen=True)
class Logistic:
    """Mean of ``log(1 + exp(-y a'x))``: any object with a value, a gradient and a number of samples can be a client."""

    A: Tensor
    y: Tensor
    num_examples: int = 40

    def __call__(self, x: Tensor) -> Tensor:
        return nn.functional.softplus(-self.y * (self.A @ x)).mean()

    def grad(self, x: Tensor) -> Tensor:
        return -self.A.T @ (self.y * torch.sigmoid(-self.y * (self.A @ x))) / len(self.y)


@dataclass(frozen=True)
class Problem:
    """Clients, FedADMM with the set of allowed models, and the solver of local problems."""

    clients: list[Loss]
    algorithm: FedADMM
    solver: Solver

    def federated(self, rounds: int = 300, seed: int = 0) -> History:
        return simulate(self.algorithm, self.clients, X0, rounds, solver=self.solver, sampler=Uniform(3), seed=seed)

    def centralised(self, x: Tensor = X0, lr: float = 0.3) -> Tensor:
        for _ in range(1000):
            x = self.algorithm.g.prox(x - lr * self.gradient(x), lr)
        return x

    def gradient(self, x: Tensor) -> Tensor:
        return torch.stack([f.grad(x) for f in self.clients]).mean(0)

    def mapping(self, x: Tensor) -> float:  # zero where, and only where, x is a solution
        return float(gradient_mapping(self.algorithm, x, self.gradient(x), self.algorithm.eta).norm())

    def violation(self, x: Tensor) -> float:
        return float((x - self.algorithm.g.prox(x, 1.0)).norm())


def problems() -> dict[str, Problem]:
    """Mixture weights on a simplex, a classifier in a box, a regression in a ball; true models differ by client."""
    drawn = torch.randn(8, 41, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    data = [(d[:40], d[:40] @ (torch.linspace(-1, 1.5, 6).to(d) + d[40])) for d in drawn]
    squares: list[Loss] = [Quadratic(a.T @ a / 40, a.T @ b / 40, 40) for a, b in data]
    signs: list[Loss] = [Logistic(a, b.sign()) for a, b in data]
    return {
        "simplex": Problem(squares, FedADMM(eta=1.0, g=Simplex()), Exact()),
        "box": Problem(signs, FedADMM(eta=0.2, g=Box(-0.25, 0.25)), GradientDescent(steps=10, lr=1.0)),
        "ball": Problem(squares, FedADMM(eta=1.0, g=Ball(0.5)), Exact()),
    }


class Regression(pl.LightningModule):
    """A module without constraints; ``largest`` is its largest weight after each round."""

    def __init__(self) -> None:
        super().__init__()
        self.net, self.largest = nn.Linear(6, 1), list[float]()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.mse_loss(self.net(batch[0]).squeeze(-1), batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.largest.append(max(float(p.detach().abs().max()) for p in self.parameters()))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def fit(bound: float, rounds: int = 8) -> list[float]:
    pl.seed_everything(0, verbose=False)
    X = torch.randn(400, 6)
    data = FederatedDataModule.from_dataset(TensorDataset(X, X.sum(-1)), IID(clients=8), batch_size=10)
    server = FederatedServer(FedADMM(eta=1.0, g=Box(-bound, bound)), clients_per_round=3, evaluate_every=0)
    quiet = dict.fromkeys(("logger", "enable_checkpointing", "enable_model_summary", "enable_progress_bar"), False)
    trainer = pl.Trainer(max_epochs=rounds, accelerator="cpu", callbacks=[server], limit_val_batches=0, **quiet)
    trainer.fit(module := Regression(), datamodule=data)
    return module.largest


def main() -> None:
    print("set      violation of x_bar   of x_i: first, last   gradient mapping: first, last   from centralised")
    axes = plt.figure(figsize=(6, 3.4), layout="constrained").subplots()
    for name, problem in problems().items():
        run = problem.federated()
        x_bar = max(problem.violation(state.x_bar) for state in run.server[1:])
        x_i = [max(problem.violation(client.x_i) for client in run.clients[k]) for k in (1, -1)]
        G, away = [problem.mapping(run.server[k].x_bar) for k in (1, -1)], (run.x_bar - problem.centralised()).norm()
        print(f"{name:9s}{x_bar:18.1e}{x_i[0]:15.1e}{x_i[1]:10.1e}{G[0]:21.1e}{G[1]:11.1e}{away:19.1e}")
        rounds = range(1, len(run.server))
        (line,) = axes.semilogy(rounds, [problem.mapping(run.server[k].x_bar) for k in rounds], label=name)
        outside = [max(problem.violation(client.x_i) for client in run.clients[k]) for k in rounds]
        axes.semilogy(rounds, outside, ":", color=line.get_color())
    axes.set(xlabel="round", ylabel="gradient mapping; dotted: violation by clients", title="Models in a set")
    axes.legend()
    path = Path("runs/constrained.png")
    path.parent.mkdir(exist_ok=True)
    plt.savefig(path, dpi=110)
    print(f"Figure: {path}")
    print("largest weight of a LightningModule in a box of 0.5, by round:", *(f"{w:.3f}" for w in fit(bound=0.5)))


if __name__ == "__main__":
    main()
