"""The same method in other variables: identities between algorithms, each under its exact conditions."""

import numpy as np
import pytest
import torch
from helpers import references
from helpers.marks import quick_first
from helpers.problems import (
    LAW,
    close,
    federations,
    gradient,
    identical,
    in_numpy,
    random_clients,
    schedule,
    seeds,
    shares,
)
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR, FedProx, fedadmm_paper, feddr
from lightning_fed.laboratory import History
from lightning_fed.prox import L1, Box, SquaredL2, Zero

ETA = 5.0  # above the largest curvature of `random_clients`, which is 4
REGULARISERS = {
    "zero": (Zero(), references.zero),
    "l1": (L1(0.2), references.soft(0.2)),
    "squared l2": (SquaredL2(0.3), references.shrink(0.3)),
    "box": (Box(-0.3, 0.4), references.clip(-0.3, 0.4)),
}
STARTS = ["local", "server", "centre"]
WEIGHTS = ["uniform", "samples"]
SOLVERS = {
    "exact": (Exact(), references.exact),
    "three steps": (GradientDescent(3, 0.05), references.descent(3, 0.05)),
}
regularisers = st.sampled_from(list(REGULARISERS))


def column(history, name):
    """One variable of every client after every round."""
    return np.array([[getattr(state, name).numpy() for state in states] for states in history.clients])


def models(history):
    return np.array([server.x_bar.numpy() for server in history.server])


def same_run(admm, dr, eta, tolerance=1e-10):
    """x_bar, x_tilde, x_i, x_hat_i and y_i = x_i - z_i/eta agree, for everybody and after every round."""
    close(models(admm), models(dr), tolerance)
    close([s.x_tilde.numpy() for s in admm.server], [s.x_tilde.numpy() for s in dr.server], tolerance)
    close(column(admm, "x_i"), column(dr, "x_i"), tolerance)
    close(column(admm, "x_hat_i"), column(dr, "x_hat_i"), tolerance)
    close(column(admm, "x_i") - column(admm, "z_i") / eta, column(dr, "y_i"), tolerance)


@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("solver", SOLVERS)
@given(federations(), regularisers)
@LAW
def test_fedadmm_is_feddr_in_other_variables(solver, start, weights, federation, g):
    clients, x0, cohorts = federation
    common = {"g": REGULARISERS[g][0], "weights": weights, "start": start}
    how = {"x0": x0, "cohorts": cohorts, "solver": SOLVERS[solver][0]}
    admm = simulate(FedADMM(eta=ETA, **common), clients, **how)
    dr = simulate(FedDR(eta_hat=1 / ETA, **common), clients, **how)
    same_run(admm, dr, ETA)


@pytest.mark.parametrize("g", REGULARISERS)
def test_fedadmm_stays_feddr_for_a_hundred_rounds_with_a_late_joiner(g):
    clients, x0 = random_clients(7, n=6, d=5)
    how = {"x0": x0, "cohorts": schedule(3, 6, 100)}
    admm = simulate(FedADMM(eta=9.0, g=REGULARISERS[g][0]), clients, **how)
    dr = simulate(FedDR(eta_hat=1 / 9.0, g=REGULARISERS[g][0]), clients, **how)
    same_run(admm, dr, 9.0)
    assert 5 not in set().union(*how["cohorts"][:33])
    close(column(admm, "x_hat_i")[33, 5], x0, 0)
    assert np.abs(column(admm, "x_hat_i")[100, 5] - x0.numpy()).max() > 0.1


def test_fedadmm_and_feddr_part_at_once_when_their_start_rules_differ():
    clients, x0 = random_clients(7, n=4, d=3)
    how = {"x0": x0, "rounds": 5, "solver": GradientDescent(3, 0.05)}
    admm = simulate(FedADMM(eta=ETA, start="local"), clients, **how)
    dr = simulate(FedDR(eta_hat=1 / ETA, start="server"), clients, **how)
    assert np.abs(models(admm) - models(dr)).max() > 1e-3


@pytest.mark.parametrize("alpha", [0.5, 1.5, 1.95, 2.0])
@given(federations(), regularisers, st.sampled_from(STARTS), st.sampled_from(WEIGHTS), st.sampled_from(list(SOLVERS)))
@LAW
def test_relaxed_fedadmm_is_relaxed_feddr(alpha, federation, g, start, weights, solver):
    clients, x0, cohorts = federation
    common = {"alpha": alpha, "g": REGULARISERS[g][0], "weights": weights, "start": start}
    how = {"x0": x0, "cohorts": cohorts, "solver": SOLVERS[solver][0]}
    admm = simulate(FedADMM(eta=ETA, **common), clients, **how)
    dr = simulate(FedDR(eta_hat=1 / ETA, **common), clients, **how)
    same_run(admm, dr, ETA)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.95])
@given(federations(), regularisers, st.sampled_from(WEIGHTS), st.sampled_from(list(SOLVERS)))
@LAW
def test_feddr_from_prox_is_fedadmm_after_one_full_round_at_the_front(alpha, federation, g, weights, solver):
    clients, x0, cohorts = federation
    common = {"alpha": alpha, "g": REGULARISERS[g][0], "weights": weights}
    how = {"x0": x0, "solver": SOLVERS[solver][0]}
    dr = simulate(FedDR(eta_hat=1 / ETA, init="prox", **common), clients, cohorts=cohorts, **how)
    admm = simulate(FedADMM(eta=ETA, **common), clients, cohorts=[range(len(clients)), *cohorts], **how)
    admm.server, admm.clients = admm.server[1:], admm.clients[1:]
    same_run(admm, dr, ETA)


@given(federations(), regularisers, st.sampled_from([0.5, 1.0, 1.5]))
@LAW
def test_fedadmm_started_at_prox_is_feddr_started_at_prox_when_both_count_it(federation, g, alpha):
    clients, x0, cohorts = federation
    eye, common = torch.eye(len(x0), dtype=x0.dtype), {"alpha": alpha, "g": REGULARISERS[g][0]}
    x = [torch.linalg.solve(f.A + ETA * eye, f.b + ETA * x0) for f in clients]
    x_tilde = sum(2 * x_i - x0 for x_i in x) / len(x)
    admm_states = [fedadmm_paper.ClientState(x_i, ETA * (x_i - x0), torch.tensor(ETA, dtype=x0.dtype)) for x_i in x]
    dr_states = [feddr.ClientState(x_i, x0) for x_i in x]
    begun = History([fedadmm_paper.ServerState(x0, x_tilde)], [admm_states])
    admm = simulate(FedADMM(eta=ETA, **common), clients, cohorts=cohorts, resume=begun)
    begun = History([feddr.ServerState(x0, x_tilde)], [dr_states])
    dr = simulate(FedDR(eta_hat=1 / ETA, **common), clients, cohorts=cohorts, resume=begun)
    same_run(admm, dr, ETA)


@given(federations(), st.sampled_from(WEIGHTS), st.floats(0.1, 2.0))
@LAW
def test_fedprox_without_a_pull_is_fedavg(federation, weights, server_lr):
    clients, x0, cohorts = federation
    how = {"x0": x0, "cohorts": cohorts, "solver": GradientDescent(4, 0.07)}
    avg = simulate(FedAvg(weights=weights, server_lr=server_lr), clients, **how)
    prox = simulate(FedProx(mu=0.0, weights=weights, server_lr=server_lr), clients, **how)
    close(models(avg), models(prox), 1e-13)


@pytest.mark.parametrize("weights", WEIGHTS)
@given(federations(), st.floats(0.1, 1.5))
@LAW
def test_fedavg_with_one_full_step_is_gradient_descent(weights, federation, server_lr):
    clients, x, _ = federation
    how = {"x0": x, "rounds": 10, "solver": GradientDescent(1, 0.1)}
    for server in simulate(FedAvg(weights=weights, server_lr=server_lr), clients, **how).server:
        close(server.x_bar, x)
        x = x - server_lr * 0.1 * gradient(clients, x, weights)


def test_fedavg_with_many_steps_on_unlike_clients_stops_elsewhere():
    clients, x0 = random_clients(5, n=4, d=3, convex=True)
    end = simulate(FedAvg(weights="uniform"), clients, x0, rounds=400, solver=GradientDescent(20, 0.1)).x_bar
    assert gradient(clients, end).norm() > 1e-2


@pytest.mark.parametrize("make", [lambda w: FedADMM(eta=9.0, weights=w), lambda w: FedDR(1 / 9.0, weights=w)])
@pytest.mark.parametrize("weights", quick_first(reversed(WEIGHTS)))
@pytest.mark.parametrize("seed", quick_first([1, 4]))
def test_limits_are_stationary_for_the_weights_that_were_asked_for(make, weights, seed):
    clients, x0 = random_clients(seed, n=5, d=3)
    assert min(torch.linalg.eigvalsh(f.A).min() for f in clients) < 0  # one client is not convex
    end = simulate(make(weights), clients, x0, cohorts=schedule(seed, 5, 1500)).x_bar
    close(gradient(clients, end, weights), torch.zeros(3), 1e-10)
    other = "samples" if weights == "uniform" else "uniform"
    assert gradient(clients, end, other).norm() > 1e-2


@pytest.mark.parametrize("g", quick_first(["l1", "zero", "squared l2", "box"]))
@pytest.mark.parametrize("weights", quick_first(reversed(WEIGHTS)))
def test_limits_are_stationary_with_a_regulariser(g, weights):
    clients, x0 = random_clients(4, n=5, d=3)
    ours = simulate(FedADMM(eta=9.0, g=REGULARISERS[g][0], weights=weights), clients, x0, cohorts=schedule(4, 5, 1500))
    x = ours.x_bar.numpy()
    step = x - gradient(clients, ours.x_bar, weights).numpy() / 9.0
    close(9.0 * (x - REGULARISERS[g][1](step, 1 / 9.0)), np.zeros(3), 1e-10)


@pytest.mark.parametrize("weights", WEIGHTS)
@given(federations(), st.floats(4.5, 20.0))
@LAW
def test_first_full_round_of_fedadmm_goes_twice_as_far_as_fedprox(weights, federation, eta):
    clients, x0, _ = federation
    admm = simulate(FedADMM(eta=eta, weights=weights), clients, x0, rounds=1).x_bar
    points = [references.exact(f, None, 0.0, eta, x0.numpy()) for f in in_numpy(clients)]
    close(admm, x0.numpy() + 2 * (shares(clients, weights) @ np.array(points) - x0.numpy()))
    prox = simulate(FedProx(mu=eta, weights=weights), clients, x0, rounds=1).x_bar
    close(admm, x0 + 2 * (prox - x0))


@given(seeds, regularisers, st.sampled_from([0.5, 1.0, 1.5]))
@LAW
def test_fedadmm_with_one_client_is_douglas_rachford_splitting(seed, g, alpha):
    clients, x0 = random_clients(seed, n=1, d=3)
    (f,), prox_g = in_numpy(clients), REGULARISERS[g][1]
    drs = references.two_operator_drs(
        lambda v: references.exact(f, None, 0.0, ETA, v), lambda v: prox_g(v, 1 / ETA), x0.numpy(), 25, alpha
    )
    ours = models(simulate(FedADMM(eta=ETA, alpha=alpha, g=REGULARISERS[g][0]), clients, x0, rounds=25))
    scale = max(1.0, np.abs(ours).max())  # one non-convex client alone need not have a minimum
    close(ours[1:] / scale, np.array(drs) / scale)


def two_block_admm(f, prox_g, x0, rounds, *, textbook):
    """min f(x) + g(u) subject to x = u; the u of every round."""
    x, u, z, path = x0, x0, 0 * x0, []
    for _ in range(rounds):
        if not textbook:
            u = prox_g(x + z / ETA, 1 / ETA)
            path.append(u)
        x = references.exact(f, None, z, ETA, u)
        if textbook:
            path.append(u)
            u = prox_g(x + z / ETA, 1 / ETA)
        z = z + ETA * (x - u)
    return np.array(path)


@given(seeds, regularisers)
@LAW
def test_fedadmm_with_one_client_is_two_block_admm_with_the_consensus_block_first(seed, g):
    clients, x0 = random_clients(seed, n=1, d=3, convex=True)
    admm = FedADMM(eta=ETA, g=REGULARISERS[g][0], project_initial=True)
    ours = simulate(admm, clients, x0, rounds=24)
    (f,) = in_numpy(clients)
    close(models(ours), two_block_admm(f, REGULARISERS[g][1], x0.numpy(), 25, textbook=False))


def test_textbook_order_of_two_block_admm_gives_other_iterates():
    clients, x0 = random_clients(0, n=1, d=3, convex=True)
    ours = models(simulate(FedADMM(eta=ETA), clients, x0, rounds=24))
    (f,) = in_numpy(clients)
    theirs = two_block_admm(f, references.zero, x0.numpy(), 25, textbook=True)
    close(ours[0], theirs[0])
    assert np.abs(ours - theirs).max() > 0.05


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("weights", WEIGHTS)
@given(federations(), regularisers, st.sampled_from(STARTS), st.sampled_from([0.5, 1.0, 1.7, 2.0]), st.booleans())
@LAW
def test_fedadmm_is_its_definition(solver, weights, federation, g, start, alpha, project):
    clients, x0, cohorts = federation
    admm = FedADMM(eta=ETA, alpha=alpha, g=REGULARISERS[g][0], weights=weights, start=start, project_initial=project)
    ours = simulate(admm, clients, x0, cohorts=cohorts, solver=SOLVERS[solver][0])
    prox, solve, w = REGULARISERS[g][1], SOLVERS[solver][1], shares(clients, weights)
    first = prox(x0.numpy(), 1 / ETA) if project else None
    rows = references.fedadmm(in_numpy(clients), x0, cohorts, ETA, alpha, prox, w, start, solve, first)
    compare(ours, rows, {"x_i": "x", "z_i": "z", "x_hat_i": "x_hat"})


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("init", ["x0", "prox"])
@given(federations(), regularisers, st.sampled_from(STARTS), st.sampled_from([0.5, 1.0, 1.7, 2.0]), st.booleans())
@LAW
def test_feddr_is_its_definition(solver, init, federation, g, start, alpha, unlike):
    clients, x0, cohorts = federation
    weights = "samples" if unlike else "uniform"
    dr = FedDR(eta_hat=0.2, alpha=alpha, g=REGULARISERS[g][0], weights=weights, start=start, init=init)
    ours = simulate(dr, clients, x0, cohorts=cohorts, solver=SOLVERS[solver][0])
    prox, solve, w = REGULARISERS[g][1], SOLVERS[solver][1], shares(clients, weights)
    rows = references.feddr(in_numpy(clients), x0, cohorts, 0.2, alpha, prox, w, start, solve, init)
    compare(ours, rows, {"x_i": "x", "y_i": "y", "x_hat_i": "x_hat"})


def compare(ours, rows, names):
    close(models(ours), [row.x_bar for row in rows])
    close([s.x_tilde.numpy() for s in ours.server], [row.x_tilde for row in rows])
    for our_name, name in names.items():
        close(column(ours, our_name), [getattr(row, name) for row in rows])


@pytest.mark.parametrize("solver", SOLVERS)
@pytest.mark.parametrize("weights", WEIGHTS)
@pytest.mark.parametrize("mu", [None, 0.7])
@given(federations(convex=True), st.floats(0.2, 1.5))
@LAW
def test_fedavg_and_fedprox_are_their_definitions(mu, solver, weights, federation, server_lr):
    clients, x0, cohorts = federation
    common = {"weights": weights, "server_lr": server_lr}
    algorithm = FedAvg(**common) if mu is None else FedProx(mu=mu, **common)
    ours = simulate(algorithm, clients, x0, cohorts=cohorts, solver=SOLVERS[solver][0])
    counts = [f.num_examples for f in clients] if weights == "samples" else None
    rows = references.fedprox(in_numpy(clients), x0, cohorts, mu or 0.0, counts, server_lr, SOLVERS[solver][1])
    close(models(ours), [row.x_bar for row in rows], 1e-9)
    assert identical(ours.clients[0], ours.clients[-1])
