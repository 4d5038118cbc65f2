"""Clients that leave take their share of the server's memory with them, exactly; those that join bring theirs."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.problems import ALGORITHMS, EACH, MEANS, WORK, BareEngine, allowed, close, federations, name_of, solver_for
from hypothesis import given
from torch import Tensor, nn

from lightning_fed import Exact, Quadratic
from lightning_fed.algorithms import Compressed, FedADMM, FedAvg, FedDR, FedDyn, FedSplit, Scaffold
from lightning_fed.core.federation import Federation
from lightning_fed.transforms import TopK

SHARED = [a for a in ALGORITHMS if set(vars(a.init_server(torch.zeros(2)))) & set(MEANS)]
SHARED += [
    Compressed(a, TopK(1)) for a in (FedADMM(eta=6.0), FedDR(eta_hat=0.2), FedDyn(6.0), Scaffold(), FedSplit(0.2))
]


class Point(nn.Module):
    def __init__(self, x0: Tensor) -> None:
        super().__init__()
        self.x = nn.Parameter(x0.clone())


def federation_of(algorithm: Any, clients: dict[int, Quadratic], x0: Tensor) -> Federation:
    return Federation(algorithm, {cid: f.num_examples for cid, f in clients.items()}, Point(x0))


def run(federation: Federation, clients: dict[int, Quadratic], cohorts: Any, solver: Any = None) -> None:
    engine = BareEngine(clients, solver)
    for cohort in cohorts:
        federation.commit(federation.play(cohort, engine, WORK))


def memory_of(federation: Federation) -> Tensor:
    return next(value for name, value in vars(federation.server).items() if name in MEANS)


def mean_of_shares(federation: Federation) -> Tensor:
    weights = federation.weights
    shares = {cid: federation.algorithm.share(federation.recall(cid)) for cid in weights}
    mean = sum(weights[cid] * shares[cid].double() for cid in weights) / sum(weights.values())
    return mean[: federation.layout.numel]  # a share may end in a counter


@pytest.mark.parametrize("algorithm", SHARED, ids=lambda a: name_of(a) if not isinstance(a, Compressed) else str(a))
@given(given=federations(smallest=2))
@EACH
def test_the_memory_stays_the_mean_of_the_shares_of_those_who_are_there(algorithm: Any, given: Any) -> None:
    several, x0, cohorts = given
    clients, everybody = dict(enumerate(several)), list(range(len(several)))
    federation = federation_of(algorithm, clients, x0)
    solver = solver_for(algorithm)
    if not federation.started:
        run(federation, clients, [everybody], solver)
    run(federation, clients, allowed(algorithm, cohorts, len(several)), solver)
    before, x_bar = memory_of(federation), federation.server.x_bar
    close(before, mean_of_shares(federation), 1e-9)
    federation.expel(0)
    close(memory_of(federation), mean_of_shares(federation), 1e-9)
    assert federation.client_ids == everybody[1:]
    federation.admit(0, several[0].num_examples)
    close(memory_of(federation), before, 1e-9)
    if any(cohorts):
        close(federation.server.x_bar, x_bar, 1e-7)
    federation.admit(99, 3)  # a new one, with the state of round 0
    close(memory_of(federation), mean_of_shares(federation), 1e-9)


def bowls(h: float, centres: list[float]) -> dict[int, Quadratic]:
    """f_i(x) = h/2 (x - c_i)^2."""
    return {i: Quadratic.scalar(h, h * c) for i, c in enumerate(centres)}


@pytest.mark.parametrize(("eta", "h", "silent"), [(1.0, 1.0, 1), (4.0, 0.5, 2), (0.3, 2.0, 3), (10.0, 1.0, 1)])
def test_silent_clients_pull_the_model_by_the_closed_form_until_they_are_expelled(
    eta: float, h: float, silent: int
) -> None:
    n, x0 = 5, torch.tensor([7.0], dtype=torch.float64)
    clients = bowls(h, [1.0, -2.0, 4.0, 0.5, 3.0])
    active = list(range(silent, n))
    solution = sum([1.0, -2.0, 4.0, 0.5, 3.0][silent:]) / (n - silent)
    federation = federation_of(FedADMM(eta=eta), clients, x0)
    run(federation, clients, [active] * 400, Exact())
    b = silent / n
    error = (float(federation.server.x_bar) - solution) / (float(x0) - solution)
    close(error, eta * b / (eta * b + (1 - b) * h), 1e-9)
    for cid in range(silent):
        federation.expel(cid)
    run(federation, clients, [active] * 400, Exact())
    close(float(federation.server.x_bar), solution, 1e-9)


def test_a_client_that_joins_late_counts_in_the_limit() -> None:
    clients, x0 = bowls(1.0, [1.0, -2.0, 4.0]), torch.tensor([7.0], dtype=torch.float64)
    federation = federation_of(FedADMM(), {i: clients[i] for i in (0, 1)}, x0)
    run(federation, clients, [[0, 1]] * 50, Exact())
    federation.admit(2, 1)
    run(federation, clients, [[0, 1, 2]] * 200, Exact())
    close(float(federation.server.x_bar), 1.0, 1e-9)


def test_who_leaves_before_the_first_round_was_never_there() -> None:
    clients, x0 = bowls(1.0, [1.0, -2.0, 4.0]), torch.tensor([7.0], dtype=torch.float64)
    left, never = (federation_of(FedADMM(), each, x0) for each in (clients, {i: clients[i] for i in (1, 2)}))
    left.expel(0)
    for federation in (left, never):
        run(federation, clients, [[1], [1, 2], [2]], Exact())
    assert torch.equal(left.server.x_bar, never.server.x_bar)


def test_algorithms_without_a_memory_have_nothing_to_take_out() -> None:
    clients, x0 = bowls(1.0, [1.0, -2.0, 4.0]), torch.tensor([7.0], dtype=torch.float64)
    federation = federation_of(FedAvg(), clients, x0)
    run(federation, clients, [[0, 1, 2]])
    before = federation.server.x_bar
    federation.expel(1)
    assert torch.equal(federation.server.x_bar, before)


def test_wrong_clients_are_refused() -> None:
    federation = federation_of(FedADMM(), bowls(1.0, [1.0, 2.0]), torch.zeros(1, dtype=torch.float64))
    with pytest.raises(ValueError, match="Client 5 is not in the federation of 2 clients"):
        federation.expel(5)
    with pytest.raises(ValueError, match="Client 1 is in the federation already"):
        federation.admit(1, 3)
    federation.expel(0)
    with pytest.raises(ValueError, match="Client 1 is the only one left"):
        federation.expel(1)
