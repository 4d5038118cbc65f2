"""Through `Trainer.fit`, no client ever sees another's state: not its dual, data, optimiser, buffers or draws."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from helpers.modules import Net, classification, quiet_trainer
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedDR
from lightning_fed.sampling import Sampler

N = 4
few = settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
cohorts = st.lists(st.integers(0, N - 1), min_size=1, max_size=N, unique=True)
algorithms = st.sampled_from([FedADMM(eta=1.0), FedADMM(alpha=1.5, start="centre"), FedDR(eta_hat=0.5)])


@dataclass(frozen=True)
class Planned(Sampler):
    """Given cohorts, in the given order."""

    cohorts: tuple[tuple[int, ...], ...]

    def inclusion_probabilities(self, n: int) -> Any:
        return np.ones(n)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        raise AssertionError("cohorts are planned")

    def cohort(self, n: int, seed: int, round: int) -> list[int]:
        return list(self.cohorts[round])


def leaky_net() -> Net:
    """Everything through which one client could reach the next: momentum, running statistics, dropout."""
    return Net(optimizer="adam", dropout=0.3, norm=True, scheduler="step")


def tampered(data: FederatedDataModule, client: int) -> FederatedDataModule:
    """The same federation with one client's inputs replaced."""
    train = dict(data.splits["train"])
    x, y = train[f"c{client}"].tensors
    train[f"c{client}"] = TensorDataset(-3 * x + 1, y)
    return FederatedDataModule(train, batch_size=data.batch_size, drop_last=True)


def play(algorithm: Any, plan: Sequence[Sequence[int]], data: FederatedDataModule) -> dict[str, dict[str, Tensor]]:
    """What every client remembers after the planned rounds, and the server's model."""
    server = FederatedServer(
        algorithm, sampler=Planned(tuple(map(tuple, plan))), local_steps=3, buffers="local", evaluate_every=0
    )
    quiet_trainer(server, len(plan), limit_val_batches=0).fit(leaky_net(), datamodule=data)
    store = server.federation.store
    memories = {str(cid): {**vars(store[cid].state), **store[cid].buffers} for cid in store}
    return {**memories, "server": vars(server.federation.server)}


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


@few
@given(algorithm=algorithms, cohort=cohorts, changed=st.integers(0, N - 1))
def test_a_clients_data_reach_nobody_else_within_a_round(algorithm: Any, cohort: list[int], changed: int) -> None:
    data = classification(N, drop_last=True)
    ours, theirs = play(algorithm, [cohort], data), play(algorithm, [cohort], tampered(data, changed))
    for i in cohort:
        assert same(ours[f"c{i}"], theirs[f"c{i}"]) == (i != changed)


@few
@given(algorithm=algorithms, cohort=cohorts)
def test_the_order_of_clients_changes_no_clients_bits(algorithm: Any, cohort: list[int]) -> None:
    data = classification(N, drop_last=True)
    forth, back = play(algorithm, [cohort], data), play(algorithm, [cohort[::-1]], data)
    assert all(same(forth[f"c{i}"], back[f"c{i}"]) for i in cohort)
    assert torch.allclose(forth["server"]["x_bar"], back["server"]["x_bar"], atol=1e-6)


@few
@given(algorithm=algorithms, first=cohorts, second=cohorts)
def test_inactive_clients_stay_bit_identical(algorithm: Any, first: list[int], second: list[int]) -> None:
    data = classification(N, drop_last=True)
    before, after = play(algorithm, [first], data), play(algorithm, [first, second], data)
    for i in set(first) - set(second):
        assert same(before[f"c{i}"], after[f"c{i}"])
    assert after.keys() == {"server", *(f"c{i}" for i in {*first, *second})}
