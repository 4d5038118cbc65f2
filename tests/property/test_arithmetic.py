"""Arithmetic that every algorithm obeys: stacked clients, vmap, single precision."""

import pytest
import torch
from helpers.problems import (
    ALGORITHMS,
    EACH,
    WORK,
    Federation,
    close,
    every_algorithm,
    having,
    name_of,
    random_clients,
    seeds,
    shares,
)
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree as pytree

from lightning_fed import GradientDescent, simulate
from lightning_fed.algorithms import Compressed, FedADMM, FedMid, FedPAQ
from lightning_fed.core import Solution, Total, tree_map
from lightning_fed.core.reach import Reach
from lightning_fed.prox import L1
from lightning_fed.transforms import TopK

LR, STEPS = 0.05, 3


class Diagonal:
    """Gradient steps on losses a/2 x^2 - b x; ``a`` and ``b`` are of one client (d,) or of a stack (m, d)."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def gradient(self, x):
        return self.a * x - self.b

    def solve(
        self, start, *, linear=None, rho=0.0, center=None, after_step=None, evaluate_at=None, work=1.0, estimate=None
    ):
        x, v, linear, center = start, estimate, *(0.0 if t is None else t for t in (linear, center))
        for k in range(STEPS):
            slope = self.gradient(x if evaluate_at is None else evaluate_at(x, k * LR))
            x = x - LR * ((slope if v is None else v) + linear + rho * (x - center))
            x = x if after_step is None else after_step(x, LR)
            v = None if v is None else v + self.gradient(x) - slope
        return Solution(x, lr_sum=STEPS * LR, estimate=v, reach=Reach.of(STEPS, LR, rho=rho))

    def rng(self, purpose):
        return torch.Generator()


def stack(states):
    return pytree.tree_map(lambda *leaves: torch.stack(leaves), *states)


def same(together, single, tolerance=0.0):
    """Whether a record of stacked clients holds those of single ones; what all have in common may be there once."""
    for leaf, value in zip(pytree.tree_leaves(together), pytree.tree_leaves(stack(single)), strict=True):
        close(leaf.expand_as(value), value, tolerance)


def exchanges(algorithm, x0, a, b, number=4):
    """Broadcast, states and replies of single clients, exchange by exchange."""
    m = len(a)
    server, states = algorithm.init_server(x0), [algorithm.init_client(x0) for _ in range(m)]
    for _ in range(number):
        down = algorithm.broadcast(server, WORK)
        replies = [algorithm.client_step(s, down, Diagonal(a[i], b[i])) for i, s in enumerate(states)]
        yield down, states, replies
        states, total = [reply.state for reply in replies], replies[0].message
        for reply in replies[1:]:
            total = tree_map(torch.add, total, reply.message)
        server = algorithm.server_step(server, Total(total, m, m, m, down))


@every_algorithm
@given(seeds, st.integers(1, 4))
@EACH
def test_stacked_clients_take_the_same_step_as_single_ones(algorithm, seed, m):
    rng = torch.Generator().manual_seed(seed)
    x0 = torch.randn(3, generator=rng, dtype=torch.float64)
    a, b = torch.rand(2, m, 3, generator=rng, dtype=torch.float64)
    for down, states, replies in exchanges(algorithm, x0, a, b):
        together = algorithm.client_step(stack(states), down, Diagonal(a, b))
        same(together.state, [reply.state for reply in replies])
        same(together.message, [reply.message for reply in replies])
        same(together.x_i, [reply.x_i for reply in replies])


WRAPPED = [
    FedPAQ(levels=None),
    Compressed(FedADMM(eta=6.0), TopK(2)),
    Compressed(FedMid(L1(0.1)), TopK(1), feedback=True),
]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *WRAPPED], ids=name_of)
def test_steps_run_under_vmap(algorithm):
    x0 = torch.randn(3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    for down, states, replies in exchanges(algorithm, x0, a, b):

        def step(state, a, b, down=down):
            reply = algorithm.client_step(state, down, Diagonal(a, b))
            return reply.state, reply.message, reply.x_i

        state, message, x_i = torch.vmap(step)(stack(states), a, b)
        same(state, [reply.state for reply in replies], 1e-13)
        same(message, [reply.message for reply in replies], 1e-13)
        same(x_i, [reply.x_i for reply in replies], 1e-13)


def test_stacked_messages_are_not_compressed_as_one():
    x0 = torch.zeros(3, dtype=torch.float64)
    algorithm = Compressed(FedADMM(), TopK(1))
    client, down = algorithm.init_client(x0), algorithm.broadcast(algorithm.init_server(x0), WORK)
    with pytest.raises(ValueError, match=r"Compressed takes the message of one client at a time, got shape \(2, 3\)"):
        algorithm.client_step(stack([client, client]), down, Diagonal(torch.ones(2, 3), torch.ones(2, 3)))


def floats(record):
    """Precisions of vectors; a single number such as a penalty is kept as it was given."""
    return {name: v.dtype for name, v in vars(record).items() if v.is_floating_point() and v.ndim}


@every_algorithm
def test_single_precision_models_come_from_double_precision_sums(algorithm):
    clients, x0 = random_clients(3, n=4, d=3, convex=True)
    ours = simulate(algorithm, clients, x0.float(), rounds=4, solver=GradientDescent(3, LR))
    exact = simulate(algorithm, clients, x0, rounds=4, solver=GradientDescent(3, LR))
    for server, states in zip(ours.server, ours.clients, strict=True):
        assert server.x_bar.dtype == torch.float32
        assert all(dtype == torch.float64 for name, dtype in floats(server).items() if name != "x_bar")
        assert all(dtype == torch.float32 for state in states for dtype in floats(state).values())
    close(ours.x_bar, exact.x_bar, 1e-5)


@having("x_tilde", "x_hat_i")
def test_server_memory_does_not_drift_in_single_precision(algorithm):
    clients, x0 = random_clients(3, n=4, d=3, convex=True)
    run, w = Federation(algorithm, clients, x0.float()), shares(clients, getattr(algorithm, "weights", "uniform"))
    for k in range(40):
        cohort = list(range(4)) if algorithm.traits.everybody else [k % 4, (k + 1) % 4]
        old, counted = run.states(), run.server.x_tilde
        run.run([cohort])
        deltas = [float(w[i]) * (run.store[i].state.x_hat_i - old[i].x_hat_i).double() for i in cohort]
        close(run.server.x_tilde, counted + sum(deltas), 1e-14)
    close(run.server.x_tilde, sum(float(w[i]) * s.x_hat_i.double() for i, s in run.states().items()), 1e-6)
