"""The newer algorithms against references of a few lines each, written from the specification."""

import numpy as np
import pytest
import torch
from helpers import references
from helpers.problems import LAW, close, federations, gradient, in_numpy, random_clients, seeds
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import FedDRII, FedDualAvg, FedDyn, FedLin, FedMid, FedPD, Scaffold
from lightning_fed.prox import L1, Box, SquaredL2, Zero
from lightning_fed.transforms import TopK

ETA = 5.0  # above the largest curvature of `random_clients`, which is 4
REGULARISERS = {
    "zero": (Zero(), references.zero),
    "l1": (L1(0.2), references.soft(0.2)),
    "squared l2": (SquaredL2(0.3), references.shrink(0.3)),
    "box": (Box(-0.3, 0.4), references.clip(-0.3, 0.4)),
}
SOLVERS = {
    "exact": (Exact(), references.exact),
    "three steps": (GradientDescent(3, 0.05), references.descent(3, 0.05)),
}
regularisers, every_solver = st.sampled_from(list(REGULARISERS)), pytest.mark.parametrize("solver", SOLVERS)
starts = st.sampled_from(["local", "server", "centre"])
server_steps = st.sampled_from([0.3, 1.0, 1.4])


def agree(history, rows, server, client):
    """Variables of the server and of all clients, by our name and by the reference's, after every round."""
    for ours, theirs in {"x_bar": "x_bar", **server}.items():
        close([getattr(s, ours).numpy() for s in history.server], [getattr(row, theirs) for row in rows])
    for ours, theirs in client.items():
        found = [[getattr(state, ours).numpy() for state in states] for states in history.clients]
        close(found, [getattr(row, theirs) for row in rows])


@every_solver
@pytest.mark.parametrize("mode", ["fresh", "upload_first"])
@given(federations(), regularisers, starts)
@LAW
def test_feddr_ii_is_its_definition(mode, solver, federation, g, start):
    clients, x0, cohorts = federation
    ours = FedDRII(eta_hat=1 / ETA, g=REGULARISERS[g][0], mode=mode, start=start)
    history = simulate(ours, clients, x0, cohorts=cohorts, solver=SOLVERS[solver][0])
    prox, solve = REGULARISERS[g][1], SOLVERS[solver][1]
    rows = references.feddr_ii(in_numpy(clients), x0, cohorts, 1 / ETA, prox, mode, start, solve)
    agree(history, rows, {"x_tilde": "x_tilde"}, {"x_i": "x", "w_i": "w", "x_hat_i": "x_hat"})


@every_solver
@given(federations(), starts, st.floats(0.0, 0.9), st.integers(0, 1000))
@LAW
def test_fedpd_is_its_definition(solver, federation, start, skip, seed):
    clients, x0, _ = federation
    ours = FedPD(eta_hat=1 / ETA, skip=skip, start=start, seed=seed)
    history = simulate(ours, clients, x0, rounds=8, solver=SOLVERS[solver][0])
    talks = [ours.exchanges(k) for k in range(8)]
    rows = references.fedpd(in_numpy(clients), x0, talks, 1 / ETA, start, SOLVERS[solver][1])
    agree(history, rows, {}, {"x_i": "x", "lam_i": "lam", "x_0i": "own"})


def test_fedpd_skips_as_often_as_asked_and_never_or_at_random_by_seed():
    assert all(FedPD(skip=0.0, seed=s).exchanges(k) for s in range(5) for k in range(50))
    coins = {seed: [FedPD(skip=0.7, seed=seed).exchanges(k) for k in range(2000)] for seed in (0, 1)}
    assert coins[0] != coins[1]
    for tossed in coins.values():
        assert abs(np.mean(tossed) - 0.3) < 0.04


@every_solver
@given(federations(), starts)
@LAW
def test_feddyn_is_its_definition(solver, federation, start):
    clients, x0, cohorts = federation
    history = simulate(FedDyn(ETA, start=start), clients, x0, cohorts=cohorts, solver=SOLVERS[solver][0])
    rows = references.feddyn(in_numpy(clients), x0, cohorts, ETA, start, SOLVERS[solver][1])
    agree(history, rows, {"h": "h"}, {"x_i": "x", "q_i": "q"})


def own_steps(n):
    """Clients that differ in the number and in the length of their steps."""
    return [1 + i % 3 for i in range(n)], [0.1 / (1 + i) for i in range(n)]


def own_solvers(n):
    return [GradientDescent(steps, lr) for steps, lr in zip(*own_steps(n), strict=True)]


@pytest.mark.parametrize("option", [1, 2])
@given(federations(rounds=12), server_steps)
@LAW
def test_scaffold_is_its_definition_for_clients_with_unlike_steps_too(option, federation, server_lr):
    clients, x0, cohorts = federation
    n = len(clients)
    history = simulate(Scaffold(option, server_lr), clients, x0, cohorts=cohorts, solver=own_solvers(n))
    rows = references.scaffold(in_numpy(clients), x0, cohorts, option, *own_steps(n), server_lr)
    agree(history, rows, {"c": "c"}, {"c_i": "c_i"})


@given(federations(), st.sampled_from([None, 1, 2, 9]), st.sampled_from([None, 1, 2, 9]))
@LAW
def test_fedlin_is_its_definition(federation, client_k, server_k):
    clients, x0, _ = federation
    n = len(clients)
    history = simulate(FedLin(client_k, server_k), clients, x0, rounds=8, solver=own_solvers(n))
    rows = references.fedlin(in_numpy(clients), x0, 8, *own_steps(n), client_k, server_k)
    kept = {"rho_i": "rho"} if client_k is not None else {}  # nothing is kept back where all is sent
    agree(history, rows, {"g_bar": "g", "e": "e"}, kept)


@given(seeds, st.integers(1, 6), st.integers(1, 7))
@LAW
def test_compression_keeps_the_largest_entries_and_the_first_of_equal_ones(seed, d, k):
    v = torch.randint(-2, 3, (d,), generator=torch.Generator().manual_seed(seed)).double()
    close(TopK(k)(v, torch.Generator()).value, references.largest(v.numpy(), k), 0)


def test_fedlin_loses_nothing_by_compression_at_the_server_but_something_at_the_clients():
    clients, x0 = random_clients(5, n=4, d=3, convex=True)
    how = {"rounds": 300, "solver": GradientDescent(2, 0.1)}
    close(gradient(clients, simulate(FedLin(server_k=1), clients, x0, **how).x_bar), torch.zeros(3), 1e-6)
    assert gradient(clients, simulate(FedLin(client_k=1), clients, x0, **how).x_bar).norm() > 1e-3


@pytest.mark.parametrize("kind", [FedMid, FedDualAvg])
@pytest.mark.parametrize("weights", ["uniform", "samples"])
@given(federations(), regularisers, server_steps, st.integers(1, 4))
@LAW
def test_fedmid_and_feddualavg_are_their_definitions(weights, kind, federation, g, server_lr, steps):
    clients, x0, cohorts = federation
    ours = kind(g=REGULARISERS[g][0], server_lr=server_lr, weights=weights)
    history = simulate(ours, clients, x0, cohorts=cohorts, solver=GradientDescent(steps, 0.07))
    counts = [f.num_examples for f in clients] if weights == "samples" else None
    reference = references.fedmid if kind is FedMid else references.feddualavg
    rows = reference(in_numpy(clients), x0, cohorts, steps, 0.07, REGULARISERS[g][1], server_lr, counts)
    agree(history, rows, {} if kind is FedMid else {"z": "z"}, {})


def test_feddualavg_counts_the_mean_length_of_unlike_clients():
    clients, x0 = random_clients(5, n=3, d=2)
    solvers = [GradientDescent(1, 0.1), GradientDescent(4, 0.05), GradientDescent(2, 0.2)]
    history = simulate(FedDualAvg(L1(0.1), server_lr=0.5), clients, x0, cohorts=[[0], [1, 2], []], solver=solvers)
    elapsed = [0.0, 0.05, 0.05 + 0.5 * (0.2 + 0.4) / 2]
    close([float(s.elapsed) for s in history.server], [*elapsed, elapsed[-1]], 1e-15)
    for server, t in zip(history.server[1:3], elapsed[1:], strict=True):
        close(server.x_bar, L1(0.1).prox(server.z, t), 1e-15)


def test_what_works_step_by_step_refuses_exact_solves():
    clients, x0 = random_clients(5, n=2, d=2, convex=True)
    with pytest.raises(ValueError, match="Scaffold needs plain gradient steps"):
        simulate(Scaffold(2), clients, x0, rounds=1)
    for algorithm in (FedMid(L1(0.1)), FedDualAvg(L1(0.1))):
        with pytest.raises(TypeError, match="works step by step; use GradientDescent"):
            simulate(algorithm, clients, x0, rounds=1)
