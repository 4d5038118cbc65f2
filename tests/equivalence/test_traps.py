"""Mistakes of the source paper: the wrong variant has a wrong limit, ours has not, and the wrong one is not offered."""

import dataclasses

import numpy as np
import pytest
import torch
from helpers import references
from helpers.marks import quick_first
from helpers.problems import LAW, close, gradient, identical, in_numpy, random_clients, schedule, seeds
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import Quadratic, simulate
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR
from lightning_fed.core import Broadcast
from lightning_fed.core.memory import MemoryStore
from lightning_fed.laboratory.quadratic import Exact, Oracle
from lightning_fed.prox import L1, Box, Zero

N, D, ETA = 5, 3, 9.0
CLIENTS, X0 = random_clients(4, N, D)  # the first is not convex, the mean is; curvatures stay below 4
PROBLEM = in_numpy(CLIENTS)
LONG = schedule(4, N, 1500)


def feddr_as_printed(x0, cohorts, server_counts_the_start):
    """Algorithm 1: clients start at their prox; the printed server starts at x0 all the same."""
    y = np.tile(x0, (N, 1))
    x = np.array([references.exact(f, None, 0.0, ETA, x0) for f in PROBLEM])
    x_hat = 2 * x - y
    x_tilde = x_hat.mean(0) if server_counts_the_start else x0
    offset = x_tilde - x_hat.mean(0)
    for cohort in cohorts:
        x_bar = x_tilde.copy()
        for i in cohort:
            y[i] = y[i] + x_bar - x[i]
            x[i] = references.exact(PROBLEM[i], None, 0.0, ETA, y[i])
            x_tilde = x_tilde + (2 * x[i] - y[i] - x_hat[i]) / N
            x_hat[i] = 2 * x[i] - y[i]
    return x_tilde, offset


def test_prox_initialised_clients_under_a_server_at_x0_have_a_wrong_limit():
    end, offset = feddr_as_printed(X0.numpy(), LONG, server_counts_the_start=False)
    slope = gradient(CLIENTS, torch.as_tensor(end))
    assert slope.norm() > 0.5
    close(slope, ETA * offset, 1e-9)


def test_our_feddr_from_prox_counts_the_start_and_reaches_a_stationary_point():
    ours = simulate(FedDR(eta_hat=1 / ETA, init="prox"), CLIENTS, X0, cohorts=LONG)
    close(gradient(CLIENTS, ours.x_bar), torch.zeros(D), 1e-10)
    close(ours.x_bar, feddr_as_printed(X0.numpy(), LONG, server_counts_the_start=True)[0], 1e-10)
    start = [s.x_hat_i for s in ours.clients[0]]
    close(ours.server[0].x_tilde, sum(start) / N, 1e-14)
    assert (ours.server[0].x_tilde - X0).norm() > 0.1


def fedadmm_with_joiners_from_today(x0, cohorts):
    """Late joiners are created from today's x_bar, though x_tilde holds x0 for them."""
    x, z, x_tilde, offset = {}, {}, x0, 0 * x0
    for cohort in cohorts:
        x_bar = x_tilde.copy()
        for i in cohort:
            if i not in x:
                x[i], z[i] = x_bar, 0 * x0
                offset = offset + (x0 - x_bar) / N
            x_hat = x[i] + z[i] / ETA
            x[i] = references.exact(PROBLEM[i], None, z[i], ETA, x_bar)
            z[i] = z[i] + ETA * (x[i] - x_bar)
            x_tilde = x_tilde + (x[i] + z[i] / ETA - x_hat) / N
    return x_tilde, offset


@pytest.mark.parametrize("late", quick_first([4, 1]))
def test_late_joiners_created_from_todays_model_have_a_wrong_limit(late):
    cohorts = [[i for i in cohort if i != late or k > 100] for k, cohort in enumerate(LONG)]
    end, offset = fedadmm_with_joiners_from_today(X0.numpy(), cohorts)
    slope = gradient(CLIENTS, torch.as_tensor(end))
    assert slope.norm() > 0.2
    close(slope, ETA * offset, 1e-9)
    for ours in (FedADMM(eta=ETA), FedADMM(eta=ETA, alpha=0.5), FedDR(eta_hat=1 / ETA)):
        close(gradient(CLIENTS, simulate(ours, CLIENTS, X0, cohorts=cohorts).x_bar), torch.zeros(D), 1e-10)


@pytest.mark.parametrize("algorithm", [FedADMM(eta=ETA), FedDR(eta_hat=1 / ETA, alpha=1.5)], ids=["FedADMM", "FedDR"])
def test_a_client_that_never_took_part_has_the_state_of_round_zero(algorithm):
    history = simulate(algorithm, CLIENTS, X0, cohorts=[[0, 1, 2]] * 30)
    assert (history.x_bar - X0).norm() > 0.1
    assert identical(history.clients[30][4], algorithm.init_client(X0))
    assert torch.equal(history.clients[30][4].x_hat_i, X0)


def test_the_store_cannot_be_told_of_todays_model():
    store = MemoryStore(fresh=lambda: FedADMM(eta=ETA).init_client(X0))
    run = simulate(FedADMM(eta=ETA), CLIENTS, X0, cohorts=[[0]])
    store.load_state_dict({0: {"state": vars(run.clients[1][0]), "visits": 1, "buffers": {}, "cost": [], "layout": 0}})
    assert torch.equal(store["newcomer"].state.x_hat_i, X0)
    assert store["newcomer"].visits == 0


def fedadmm_with_a_server_step(x0, cohorts, c):
    x, z, x_tilde = np.tile(x0, (N, 1)), np.zeros((N, D)), x0
    for cohort in cohorts:
        x_bar = x_tilde.copy()
        for i in cohort:
            old = x[i].copy()
            x[i] = references.exact(PROBLEM[i], None, z[i], ETA, x_bar)
            z[i] = z[i] + ETA * (x[i] - x_bar)
            x_tilde = x_tilde + c / N * (2 * x[i] - old - x_bar)
    return x_tilde


def test_a_server_step_on_the_deltas_has_a_wrong_limit_and_is_not_offered():
    end = fedadmm_with_a_server_step(X0.numpy(), LONG, c=0.5)
    close(gradient(CLIENTS, torch.as_tensor(end)), ETA * (0.5 - 1) / 0.5 * (end - X0.numpy()), 1e-9)
    assert gradient(CLIENTS, torch.as_tensor(end)).norm() > 0.5
    close(gradient(CLIENTS, torch.as_tensor(fedadmm_with_a_server_step(X0.numpy(), LONG, c=1.0))), np.zeros(D), 1e-9)
    names = {cls: [f.name for f in dataclasses.fields(cls)] for cls in (FedADMM, FedDR)}
    assert names[FedADMM] == ["eta", "alpha", "g", "weights", "start", "project_initial", "mean"]
    assert names[FedDR] == ["eta_hat", "alpha", "g", "weights", "start", "init"]
    for cls in names:
        with pytest.raises(TypeError, match="server_lr"):
            cls(server_lr=0.5)
    assert "server_lr" in [f.name for f in dataclasses.fields(FedAvg)]


@given(seeds, st.sampled_from([0.5, 1.0, 1.5]))
@LAW
def test_the_dual_moves_by_the_received_model(seed, alpha):
    (f,), x0 = random_clients(seed, 1, D)
    rng = torch.Generator().manual_seed(seed)
    x_i, z_i, x_bar = torch.randn(3, D, generator=rng, dtype=torch.float64)
    admm = FedADMM(eta=ETA, alpha=alpha)
    before = torch.tensor(3 * ETA, dtype=torch.float64)  # the penalty of its last visit
    state = dataclasses.replace(admm.init_client(x0), x_i=x_i, z_i=z_i, eta=before)
    reply = admm.client_step(state, Broadcast(x_bar), Oracle(f, Exact()))
    received = alpha * x_bar + (1 - alpha) * x_i
    close(reply.state.z_i, z_i + ETA * (reply.x_i - received), 1e-12)
    close(reply.state.x_hat_i, reply.x_i + reply.state.z_i / ETA, 1e-12)
    close(reply.message.delta_i, reply.state.x_hat_i - (x_i + z_i / (3 * ETA)), 1e-12)
    close(f.grad(reply.x_i) + z_i + ETA * (reply.x_i - received), torch.zeros(D), 1e-11)
    if alpha == 1:
        own = dataclasses.replace(state, eta=torch.tensor(ETA, dtype=torch.float64))
        delta = admm.client_step(own, Broadcast(x_bar), Oracle(f, Exact())).message.delta_i
        close(delta, 2 * reply.x_i - x_i - x_bar, 1e-12)


def test_textbook_consensus_admm_whose_dual_uses_the_new_average_is_another_sequence():
    x_bar, z, path = X0.numpy(), np.zeros((N, D)), [X0.numpy()]
    for _ in range(10):
        x = np.array([references.exact(f, None, z[i], ETA, x_bar) for i, f in enumerate(PROBLEM)])
        x_bar = (x + z / ETA).mean(0)
        z = z + ETA * (x - x_bar)
        path.append(x_bar)
    ours = [s.x_bar.numpy() for s in simulate(FedADMM(eta=ETA), CLIENTS, X0, rounds=10).server]
    assert np.abs(np.array(ours[1:]) - np.array(path[1:])).max(axis=1).min() > 1e-2


def test_eta_is_a_penalty_in_fedadmm_and_a_step_in_feddr():
    def move(algorithm):
        return float((simulate(algorithm, CLIENTS, X0, rounds=1).x_bar - X0).norm())

    assert move(FedADMM(eta=40.0)) < move(FedADMM(eta=20.0)) < move(FedADMM(eta=10.0))
    assert move(FedDR(eta_hat=0.025)) < move(FedDR(eta_hat=0.05)) < move(FedDR(eta_hat=0.1))
    assert move(FedADMM(eta=40.0)) == pytest.approx(move(FedDR(eta_hat=1 / 40.0)), abs=1e-12)
    convex, x0 = random_clients(1, N, D, convex=True)
    admm, dr = (simulate(a, convex, x0, rounds=3).x_bar for a in (FedADMM(eta=0.2), FedDR(eta_hat=0.2)))
    assert (admm - dr).norm() > 1e-2


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5])
@pytest.mark.parametrize("g", [Zero(), L1(0.2), Box(-0.3, 0.4)], ids=repr)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_lyapunov_function_decreases_by_what_the_theory_promises(seed, g, alpha):
    clients, x0 = random_clients(seed, N, D)
    L = max(float(torch.linalg.eigvalsh(f.A).abs().max()) for f in clients)
    h = 0.95 * (2 - alpha) / (2 * L)
    q = (1 + L * h) * (2 - alpha - 2 * L * h)
    cohorts = [range(N), *schedule(seed, N, 60)]  # everybody is solved once before V makes sense
    run = simulate(FedADMM(eta=1 / h, alpha=alpha, g=g), clients, x0, cohorts=cohorts)
    rounds = zip(run.server, run.clients, strict=True)
    values = [lyapunov(clients, g, h, server.x_bar, states) for server, states in rounds]
    for k in range(1, len(cohorts)):
        moved = [(b.x_i - a.x_i).square().sum() for a, b in zip(run.clients[k], run.clients[k + 1], strict=True)]
        step = (run.server[k + 1].x_bar - run.server[k].x_bar).square().sum()
        promised = q / (2 * alpha * h) * sum(moved) / N + step / (2 * h)
        assert promised >= 0
        assert values[k + 1] <= values[k] - promised + 1e-11
    assert values[-1] < values[1] - 1e-3


def lyapunov(clients: list[Quadratic], g, h, x_bar, states):
    def part(f, x):
        return f(x) + f.grad(x) @ (x_bar - x) + (x_bar - x).square().sum() / (2 * h)

    return g(x_bar) + sum(part(f, s.x_i) for f, s in zip(clients, states, strict=True)) / N
