"""Federations to test on, the one list of algorithms, and a bare engine to run rounds with."""

from __future__ import annotations

from dataclasses import fields
from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lightning_fed import Exact, GradientDescent, Quadratic
from lightning_fed.algorithms import (
    FedAdagrad,
    FedAdam,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedDR,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedNova,
    FedPD,
    FedPrimalDual,
    FedProx,
    FedSplit,
    FedYogi,
    ParallelDRS,
    Scaffold,
)
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import Memory, MemoryStore
from lightning_fed.core.round import run_round
from lightning_fed.laboratory.quadratic import Oracle
from lightning_fed.prox import L1, Box, SquaredL2

#: What clients are told to do where a test says nothing else.
WORK = LocalWork(seed=0, steps=3, lr_sum=0.15)

#: A new algorithm is enrolled in every law of ``property/`` by one line here.
ALGORITHMS = [
    FedADMM(eta=6.0, start="local"),
    FedADMM(eta=5.0, alpha=1.5, g=L1(0.1), weights="samples"),
    FedADMM(eta=7.0, alpha=0.5, g=Box(-0.3, 0.4), start="centre", project_initial=True),
    FedADMM(eta=6.0, g=L1(0.1), weights="samples", mean="seen"),
    FedADMM(eta=6.0, g=L1(0.1), weights="samples", mean="active"),
    FedPrimalDual(rho=5.0, sigma=2.0, lam=0.3, g=Box(-0.3, 0.4)),
    FedPrimalDual(g=L1(0.1), weights="samples"),
    FedDR(eta_hat=0.2, g=SquaredL2(0.3), start="local"),
    FedDR(eta_hat=0.15, alpha=1.9, g=Box(-0.3, 0.4), weights="samples"),
    FedDR(eta_hat=0.2, alpha=0.7, g=L1(0.2), start="centre", init="prox"),
    FedAvg(weights="uniform"),
    FedAvg(server_lr=0.7),
    FedProx(mu=0.5),
    FedProx(mu=2.0, server_lr=1.3, weights="uniform"),
    FedAvgM(beta=0.5, server_lr=0.7),
    FedAdam(server_lr=0.1, tau=0.1),
    FedYogi(server_lr=0.1, tau=0.1, weights="uniform"),
    FedAdagrad(tau=0.1),
    FedNova(),
    FedNova(mu=2.0, tau_eff="norm", weights="uniform"),
    ParallelDRS(eta_hat=0.2, alpha=1.5, g=L1(0.1), weights="samples", start="local"),
    FedDRII(eta_hat=0.2, g=L1(0.1), start="local"),
    FedDRII(eta_hat=0.15, g=Box(-0.3, 0.4), mode="upload_first"),
    FedPD(eta_hat=0.2),
    FedPD(eta_hat=0.15, skip=0.5, start="centre", seed=3),
    FedPD(eta_hat=0.2, skip=0.3, oracle="II", refresh_every=3),
    FedDyn(alpha=6.0),
    FedDyn(alpha=5.0, start="local", weights="samples"),
    FedSplit(s=0.2),
    Scaffold(),
    Scaffold(option=1, server_lr=0.7, weights="samples"),
    Scaffold(vectors=1, weights="samples"),
    FedLin(),
    FedLin(client_k=1, server_k=2),
    FedMid(g=L1(0.1), server_lr=0.8),
    FedMid(g=Box(-0.3, 0.4), weights="samples"),
    FedDualAvg(g=L1(0.1), weights="samples"),
    FedDualAvg(g=Box(-0.3, 0.4), server_lr=1.2),
]

#: What a server remembers, and the clients' variable it is the mean of.
MEANS = {"x_tilde": "x_hat_i", "c": "c_i", "h": "q_i", "z_bar": "z_i"}

LAW = settings(
    max_examples=20, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.too_slow], print_blob=False
)
EACH = settings(LAW, max_examples=8)  # for laws that are tried on every algorithm
seeds = st.integers(0, 2**32 - 1)


def name_of(thing: object) -> str:
    """A test id: the fields that differ from their defaults."""
    changed = {f.name: getattr(thing, f.name) for f in fields(thing) if getattr(thing, f.name) != f.default}
    return f"{type(thing).__name__}({', '.join(f'{k}={v}' for k, v in changed.items())})"


#: Of the variants of an algorithm, `make quick` tries the last.
_QUICK = {type(algorithm): algorithm for algorithm in ALGORITHMS}.values()
every_algorithm = pytest.mark.parametrize(
    "algorithm",
    [
        pytest.param(algorithm, id=name_of(algorithm), marks=[] if algorithm in _QUICK else [pytest.mark.slow])
        for algorithm in ALGORITHMS
    ],
)


def fields_of(record: object) -> set[str]:
    return {field.name for field in fields(record)}


def variables_of(algorithm) -> set[str]:
    """Names of everything that server and clients remember, or compute from what they remember."""
    x0 = torch.zeros(2, dtype=torch.float64)
    client = algorithm.init_client(x0)
    computed = {name for name, value in vars(type(client)).items() if isinstance(value, property)}
    return fields_of(client) | computed | fields_of(algorithm.init_server(x0))


def having(*names: str):
    """Algorithms whose client or server states have these variables."""
    have = [a for a in ALGORITHMS if set(names) <= variables_of(a)]
    assert have
    return pytest.mark.parametrize("algorithm", have, ids=name_of)


def allowed(algorithm, cohorts: list[list[int]], n: int) -> list[list[int]]:
    """The schedule as far as the algorithm allows it: everybody or nobody, where it needs everybody."""
    return [list(range(n)) if cohort and algorithm.traits.everybody else cohort for cohort in cohorts]


def solver_for(algorithm):
    """Exact, where a penalty makes even a non-convex problem have a solution and no steps are asked for."""
    return Exact() if algorithm.traits.penalty and not algorithm.traits.plain_sgd else GradientDescent(3, 0.05)


def cohorts_of(n: int, rounds: int = 8) -> st.SearchStrategy[list[list[int]]]:
    """Any schedule for ``n`` clients; rounds may be empty and clients may never show up."""
    return st.lists(st.sets(st.integers(0, n - 1)).map(sorted), min_size=1, max_size=rounds)


@st.composite
def federations(draw, *, convex: bool = False, rounds: int = 8, smallest: int = 1):
    """Clients with eigenvalues in (-2, 4) or (0.1, 4), a first model, and any schedule."""
    n, d = draw(st.integers(smallest, 5)), draw(st.integers(1, 4))
    clients, x0 = random_clients(draw(seeds), n, d, convex=convex)
    return clients, x0, draw(cohorts_of(n, rounds))


def random_clients(seed: int, n: int, d: int, *, convex: bool = False) -> tuple[list[Quadratic], torch.Tensor]:
    """Quadratics with unlike curvatures, minima and numbers of samples; the first is non-convex unless ``convex``."""
    rng = np.random.default_rng(seed)
    clients = []
    for i in range(n):
        q, _ = np.linalg.qr(rng.normal(size=(d, d)))
        values = rng.uniform(0.1, 4.0, d)
        if not convex and i == 0:
            values[0] = -rng.uniform(0.1, 2.0)
        A = q @ np.diag(values) @ q.T
        clients.append(quadratic((A + A.T) / 2, rng.normal(size=d), int(rng.integers(1, 10))))
    return clients, torch.as_tensor(rng.normal(size=d))


def quadratic(A: np.ndarray, b: np.ndarray, num_examples: int = 1) -> Quadratic:
    return Quadratic(torch.as_tensor(A), torch.as_tensor(b), num_examples)


def schedule(seed: int, n: int, rounds: int) -> list[list[int]]:
    """A random schedule in which the last client joins late and the first rounds may be empty."""
    rng = np.random.default_rng(seed)
    cohorts = [[i for i in range(n) if rng.random() < 0.5] for _ in range(rounds)]
    return [[i for i in c if i < n - 1 or k >= rounds // 3] for k, c in enumerate(cohorts)]


def in_numpy(clients: list[Quadratic]) -> list[tuple[np.ndarray, np.ndarray]]:
    """``(A, b)`` of every client, for the references."""
    return [(f.A.numpy(), f.b.numpy()) for f in clients]


def shares(clients: list[Quadratic], weights: str = "uniform") -> np.ndarray:
    """The w_i of (P): 1/n, or N_i / N."""
    counts = np.array([f.num_examples if weights == "samples" else 1.0 for f in clients])
    return counts / counts.sum()


def gradient(clients: list[Quadratic], x: torch.Tensor, weights: str = "uniform") -> torch.Tensor:
    """The gradient of ``sum_i w_i f_i``."""
    return sum(float(w) * f.grad(x) for w, f in zip(shares(clients, weights), clients, strict=True))


def close(actual, expected, tolerance: float = 1e-10) -> None:
    """Refuse numbers further apart than ``tolerance`` (absolute)."""
    torch.testing.assert_close(_tensor(actual), _tensor(expected), rtol=0, atol=tolerance)


def _tensor(value) -> torch.Tensor:
    return (value if isinstance(value, torch.Tensor) else torch.as_tensor(np.asarray(value))).double()


def identical(left, right) -> bool:
    """Whether two records (or trees of them) agree bit for bit, in value and in precision."""
    a, b = pytree.tree_leaves(left), pytree.tree_leaves(right)
    same = [x.dtype == y.dtype and torch.equal(x, y) for x, y in zip(a, b, strict=True)]
    return all(same)


def copy_of(tree):
    return pytree.tree_map(lambda leaf: leaf.clone() if isinstance(leaf, torch.Tensor) else leaf, tree)


class BareEngine:
    """Asks clients one after another."""

    def __init__(self, clients: dict, solver=None):
        self.oracles = {cid: Oracle(f, solver or GradientDescent(3, 0.05)) for cid, f in clients.items()}

    def ask(self, step, states, down, cohort):
        for cid, state in zip(cohort, states, strict=True):
            yield step(state, down, self.oracles[cid])


class Federation:
    """A run of an algorithm, round by round, through :func:`run_round` and a :class:`MemoryStore`."""

    def __init__(self, algorithm, clients, x0, solver=None):
        self.clients = clients if isinstance(clients, dict) else dict(enumerate(clients))
        self.algorithm, self.engine = algorithm, BareEngine(self.clients, solver)
        self.weights = {cid: algorithm.weight(f.num_examples) for cid, f in self.clients.items()}
        self.store = MemoryStore(fresh=lambda: algorithm.init_client(x0))
        self.server = algorithm.init_server(x0)
        if algorithm.traits.full_start:
            self.run([list(self.clients)], exchanges=1)

    def outcome(self, cohort, exchanges=None):
        recall = lambda cid: self.store[cid].state  # noqa: E731
        broadcast = partial(self.algorithm.broadcast, work=WORK)
        return run_round(self.algorithm, self.server, cohort, self.engine, recall, self.weights, broadcast, exchanges)

    def run(self, cohorts, exchanges=None) -> Federation:
        for cohort in cohorts:
            done = self.outcome(cohort, exchanges)
            self.store.put({c: Memory(s, self.store[c].visits + 1) for c, s in done.states.items()})
            self.server = done.server
        return self

    def states(self) -> dict:
        return {cid: self.store[cid].state for cid in self.clients}


def golden(weights: tuple[int, int, int] = (1, 1, 1)) -> tuple[list[Quadratic], torch.Tensor]:
    """The fixture of the golden table: three clients in the plane, and x0."""
    A = [[[1.0, 0.0], [0.0, 2.0]], [[2.0, 0.5], [0.5, 1.0]], [[0.5, 0.0], [0.0, 3.0]]]
    b = [[1.0, 0.0], [0.0, 1.0], [-1.0, 1.0]]
    clients = [Quadratic(a, c, w) for a, c, w in zip(A, b, weights, strict=True)]
    return clients, torch.tensor([1.0, -1.0], dtype=torch.float64)


PARTIAL = [[0], [1, 2], [0, 2], [1]]
FULL = [[0, 1, 2]] * 4

#: rows of the golden table that several methods share
DOUGLAS_RACHFORD_FULL = [
    (0.3021276596, 0.2496453901),
    (0.1649232936, 0.3153181430),
    (0.0762988396, 0.3357713031),
    (0.0226970660, 0.3407719973),
]
PEACEMAN_RACHFORD_FULL = [
    (0.3021276596, 0.2496453901),
    (0.0277189276, 0.3809908958),
    (-0.0523701566, 0.3314580306),
    (-0.0465974451, 0.3391838089),
]


def agrees(value: float, printed: str) -> bool:
    """Equal to the last printed digit."""
    digits = len(printed.partition(".")[2])
    return abs(value - float(printed)) <= 0.5000001 * 10.0**-digits
