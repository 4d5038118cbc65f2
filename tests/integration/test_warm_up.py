"""Learning rates that start from 0, and constraints that a model does not meet yet."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import LeastSquares, Witness, least_squares, quiet_trainer

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedAvg, FedDualAvg, FedMid
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback
from lightning_fed.prox import L1, Box, NonNegative, Prox, Sum

D, LR, STEPS, ROUNDS = 4, 0.2, 3, 3
LENGTHS = [LR * k / 2 for k in range(STEPS)]  # 0, then rising


class WarmUp(LeastSquares):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        rising = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda k: k / 2)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": rising, "interval": "step"}}


def soft(v: np.ndarray, t: float) -> np.ndarray:
    return np.sign(v) * np.maximum(np.abs(v) - 0.1 * t, 0)


def clip(v: np.ndarray, t: float) -> np.ndarray:
    return np.clip(v, -0.2, 0.3)


def mid(x: np.ndarray, clients: list[Any], prox: Any) -> np.ndarray:
    for _ in range(ROUNDS):
        ends = []
        for A, b in clients:
            y = x
            for lr in LENGTHS:
                y = prox(y - lr * (A @ y - b), lr)
            ends.append(y)
        x = prox(np.mean(ends, axis=0), sum(LENGTHS))
    return x


def dual_averaging(z: np.ndarray, clients: list[Any], prox: Any) -> np.ndarray:
    before = 0.0
    for _ in range(ROUNDS):
        ends = []
        for A, b in clients:
            zeta, elapsed = z, before
            for lr in LENGTHS:
                y = prox(zeta, elapsed) if elapsed else zeta
                zeta, elapsed = zeta - lr * (A @ y - b), elapsed + lr
            ends.append(zeta)
        z, before = np.mean(ends, axis=0), before + sum(LENGTHS)
    return prox(z, before)


@pytest.mark.parametrize(("g", "prox"), [(L1(0.1), soft), (Box(-0.2, 0.3), clip)], ids=["L1", "Box"])
@pytest.mark.parametrize(("kind", "reference"), [(FedMid, mid), (FedDualAvg, dual_averaging)])
def test_a_step_of_length_zero_only_projects(kind: Any, reference: Any, g: Prox, prox: Any) -> None:
    data, quadratics = least_squares()
    server = FederatedServer(kind(g=g), local_steps=STEPS, evaluate_every=0, restart_schedulers=True)
    witness = Witness()
    quiet_trainer(server, ROUNDS, callbacks=[witness]).fit(WarmUp(D, LR), datamodule=data)
    expected = reference(witness.x0.numpy(), [(f.A.numpy(), f.b.numpy()) for f in quadratics], prox)
    np.testing.assert_allclose(witness.x_bar[-1].numpy(), expected, rtol=0, atol=1e-12)
    assert np.abs(expected - witness.x0.numpy()).max() > 0.05


class Still(LeastSquares):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.0)


def test_a_round_of_length_zero_projects_the_model() -> None:
    witness = Witness()
    server = FederatedServer(FedMid(Box(-0.2, 0.3)), evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[witness]).fit(Still(D, LR), datamodule=least_squares()[0])
    assert torch.allclose(witness.x_bar[0], witness.x0.clamp(-0.2, 0.3), rtol=0, atol=1e-15)
    assert Box(-0.2, 0.3)(witness.x_bar[0]) == 0


class Metrics(FederatedCallback):
    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.seen = {name: float(value) for name, value in trainer.callback_metrics.items()}


class Regularised(FedAvg):
    """FedAvg, whose models need not be where g is finite."""

    g: Prox = Sum([L1(0.5), NonNegative()])


@pytest.mark.parametrize("algorithm", [Regularised(), FedMid(Sum([NonNegative(), L1(0.5)]))], ids=["outside", "inside"])
def test_the_objective_counts_what_is_finite_of_g_and_the_violation_the_rest(algorithm: Algorithm) -> None:
    data, quadratics = least_squares()
    witness, metrics = Witness(), Metrics()
    trainer = quiet_trainer(FederatedServer(algorithm), 1, callbacks=[witness, ClientEvaluation(), metrics])
    trainer.fit(LeastSquares(D, LR), datamodule=data)
    x, weights = witness.x_bar[0], [algorithm.weight(f.num_examples) for f in quadratics]
    sets = [d.tensors for d in data.splits["train"].values()]
    losses = [float(0.5 * (inputs @ x - targets).square().mean()) for inputs, targets in sets]
    assert metrics.seen["federated/objective"] == pytest.approx(
        float(np.average(losses, weights=weights)) + 0.5 * float(x.abs().sum())
    )
    assert metrics.seen["federated/violation"] == pytest.approx(float(x.clamp(max=0).norm()))
    assert (metrics.seen["federated/violation"] > 0) == isinstance(algorithm, Regularised)
