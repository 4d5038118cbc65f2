"""What ``broadcast`` is told about the local work of a round: the planned sum of its step sizes."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer

from lightning_fed import Exact, FederatedServer, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import Compressed, FedAvg
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.traits import Traits
from lightning_fed.transforms import Quantize

TOLD: list[LocalWork] = []


class Noting(FedAvg):
    """Notes what it is told."""

    @property
    def traits(self) -> Traits:
        return Traits(plans_steps=True)

    def broadcast(self, server: Any, work: LocalWork) -> Any:
        TOLD.append(work)
        return super().broadcast(server, work)


@pytest.fixture(autouse=True)
def _nothing_told() -> None:
    TOLD.clear()


def told(module: Any, rounds: int = 1, weights: Any = "samples", trainer: Any = None, **settings: Any) -> list[float]:
    server = FederatedServer(Noting(weights=weights), evaluate_every=0, **settings)
    quiet_trainer(server, rounds, **(trainer or {})).fit(module, datamodule=classification(clients=3))
    return [work.lr_sum for work in TOLD]


def test_steps_times_step_size_exactly() -> None:
    assert told(Net(lr=0.1), rounds=2, local_steps=3) == [0.1 * 3] * 2
    assert (TOLD[0].steps, TOLD[0].epochs) == (3, None)


@pytest.mark.parametrize(("weights", "mean"), [("uniform", 3), ("samples", (9 * 3 + 10 * 3 + 11 * 3) / 30)])
def test_epochs_of_equal_length(weights: str, mean: float) -> None:
    (found,) = told(Net(lr=0.1), weights=weights, local_epochs=1)
    assert found == pytest.approx(0.1 * mean, rel=1e-15)


def test_epochs_are_averaged_over_all_clients_whoever_takes_part() -> None:
    server = FederatedServer(Noting(weights="samples"), local_epochs=2, evaluate_every=0, clients_per_round=1)
    quiet_trainer(server, 2).fit(Net(lr=0.1), datamodule=classification(clients=3, batch_size=5))
    batches = {9: 2 * 2, 10: 2 * 2, 11: 2 * 3}  # of 5 samples, in two epochs
    expected = 0.1 * sum(n * count for n, count in batches.items()) / 30
    assert [work.lr_sum for work in TOLD] == pytest.approx([expected] * 2, rel=1e-15)


def test_gradients_that_are_accumulated_make_fewer_steps() -> None:
    assert told(Net(lr=0.1), local_steps=5, trainer={"accumulate_grad_batches": 2}) == [0.1 * 3]


class Halving(Net):
    """Halves its step size after every local step."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


def test_a_schedule_by_step_is_planned_ahead_and_goes_on_in_the_next_round() -> None:
    assert told(Halving(), rounds=2, local_steps=3) == [1 + 0.5 + 0.25, 0.125 * (1 + 0.5 + 0.25)]


def test_planning_ahead_moves_no_schedule() -> None:
    module = Halving()
    quiet_trainer(FederatedServer(Noting(), local_steps=3), 3).fit(module, datamodule=classification(clients=3))
    assert module.optimizers().param_groups[0]["lr"] == 0.5**9


def test_other_optimisers_have_no_step_sizes() -> None:
    assert math.isnan(told(Net(optimizer="adam"), local_steps=3)[0])


def test_a_wrapped_algorithm_is_told() -> None:
    server = FederatedServer(Compressed(Noting(), Quantize(16)), local_steps=2, evaluate_every=0)
    quiet_trainer(server, 1).fit(Net(lr=0.1), datamodule=classification(clients=3))
    assert TOLD[0].lr_sum == 0.1 * 2


def test_simulate_tells_the_same() -> None:
    clients = [Quadratic.scalar(1.0, 1.0), Quadratic.scalar(1.0, 3.0)]
    simulate(Noting(weights="uniform"), clients, rounds=1, solver=GradientDescent(7, 0.1))
    simulate(Noting(weights="uniform"), clients, rounds=1, solver=[GradientDescent(1, 0.5), GradientDescent(3, 0.5)])
    simulate(Noting(weights="uniform"), clients, rounds=1, solver=[GradientDescent(1, 0.5), Exact()])
    assert [work.lr_sum for work in TOLD[:2]] == [7 * 0.1, 1.0]
    assert math.isnan(TOLD[2].lr_sum)
