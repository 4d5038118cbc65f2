"""FedADMM over the seen and the active clients, and FedPrimalDual: golden numbers, references and identities."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers import references
from helpers.problems import FULL, PARTIAL, close, golden, in_numpy, random_clients, shares

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import FedADMM, FedAvg, FedDyn, FedPrimalDual, FedProx, Scaffold
from lightning_fed.core.algorithm import hyper_parameters
from lightning_fed.prox import L1, Box, Zero
from lightning_fed.sampling import Uniform
from lightning_fed.theory.residuals import gradient_mapping

ALIKE, UNLIKE = (1, 1, 1), (5, 3, 2)
TWO_STEPS = GradientDescent(steps=2, lr=0.1)


def line(eta, **others):
    """The member of the family with one parameter."""
    return FedPrimalDual(rho=eta, sigma=eta, lam=1 / eta, **others)


#: Computed outside this package (WINNING, section 2.3): setting, cohorts, samples, solver, x_bar after rounds 1 to 4.
GOLDEN = {
    "line, g=0": (
        line(2.0), PARTIAL, ALIKE, Exact(),
        "1 -.3333333333 .0803782506 .4680851064 .0212503283 .2845744681 .0578788607 .4084107570",
    ),
    "line, l1": (
        line(2.0, g=L1(0.1)), PARTIAL, ALIKE, Exact(),
        ".95 -.2833333333 .0055555556 .4333333333 0 .2277777778 .0125552929 .3439527187",
    ),
    "line, box": (
        line(2.0, g=Box(-0.2, 0.2)), PARTIAL, ALIKE, Exact(),
        ".2 -.2 -.2 .2 -.0611347518 .2 -.0298514159 .2",
    ),
    "line, l1, full": (
        line(2.0, g=L1(0.1)), FULL, ALIKE, Exact(),
        ".2521276596 .1996453901 .1018500075 .2654599869 .0061488024 .2878552358 0 .2946126786",
    ),
    "line, weights": (
        line(2.0, weights="samples"), PARTIAL, UNLIKE, Exact(),
        "1 -.25 .1804255319 .5115957447 .2602966565 .1979937690 .2657185811 .2947423692",
    ),
    "three steps, l1": (
        FedPrimalDual(rho=2.0, sigma=0.5, lam=1.5, g=L1(0.1)), PARTIAL, ALIKE, Exact(),
        ".85 -.225 0 .2561702128 -.0668404255 .2665531915 -.1188586653 .6081317338",
    ),
    "a, b": (
        FedPrimalDual(a=0.1, b=5.0), PARTIAL, ALIKE, TWO_STEPS,
        "1 -.58 .5962 -.0669666667 .3966575 .2104703333 .1124246055 .5214602875",
    ),
    "a, b, l1": (
        FedPrimalDual(a=0.1, b=5.0, g=L1(0.1)), PARTIAL, ALIKE, TWO_STEPS,
        ".9 -.48 .4208666667 0 .1604626389 .1312780000 0 .3650334550",
    ),
    "a, b, l1, weights": (
        FedPrimalDual(a=0.1, b=5.0, g=L1(0.1), weights="samples"), PARTIAL, UNLIKE, TWO_STEPS,
        ".9 -.45 .44225 0 .2916751429 .0808619286 .0224225869 .2961030488",
    ),
    "a = b = 1": (
        FedPrimalDual(a=1.0, b=1.0), PARTIAL, ALIKE, TWO_STEPS,
        "1 -.52 .491 .1314166667 .4032541667 -.0678937500 .4435159722 .0094167153",
    ),
    "seen": (
        FedADMM(eta=2.0, mean="seen"), PARTIAL, ALIKE, Exact(),
        "1 0 .2453900709 .3035460993 .1306225374 .2966430260 .1258845687 .3207721498",
    ),
    "seen, l1": (
        FedADMM(eta=2.0, mean="seen", g=L1(0.1)), PARTIAL, ALIKE, Exact(),
        ".95 0 .1850354610 .2563829787 .0594909377 .2526241135 .0571685305 .2735201560",
    ),
    "seen, two steps": (
        FedADMM(eta=2.0, mean="seen"), PARTIAL, ALIKE, TWO_STEPS,
        "1 -.36 .628 -.0484666667 .4176100000 .1561017778 .2865227944 .3142191719",
    ),
}  # fmt: skip


@pytest.mark.parametrize("row", GOLDEN)
def test_golden_rows(row):
    algorithm, cohorts, samples, solver, text = GOLDEN[row]
    clients, x0 = golden(samples)
    history = simulate(algorithm, clients, x0, cohorts=cohorts, solver=solver)
    expected = np.array([float(word) for word in text.split()]).reshape(4, 2)
    close(torch.stack([server.x_bar for server in history.server[1:]]), expected, 1e-10)


def test_golden_states_of_clients():
    algorithm, cohorts, samples, solver, _ = GOLDEN["a, b, l1"]
    clients, x0 = golden(samples)
    history = simulate(algorithm, clients, x0, cohorts=cohorts, solver=solver)
    z = [(0.0550176667, 0.1638000000), (-0.1666148867, 0.1675993378), (-0.2456081875, 0.2747710000)]
    close(torch.stack([client.z_i for client in history.clients[-1]]), z, 1e-10)
    close(history.server[-1].z_bar, (-0.1190684692, 0.2020567793), 1e-10)


def prox_of(g):
    return {Zero: references.zero, L1: references.soft(0.1), Box: references.clip(-0.2, 0.3)}[type(g)]


every_g = pytest.mark.parametrize("g", [Zero(), L1(0.1), Box(-0.2, 0.3)], ids=lambda g: type(g).__name__)
weighted = pytest.mark.parametrize("weights", ["uniform", "samples"])
COHORTS = [[0], [], [2, 3], [0, 2], [1], [0, 1, 2, 3], [3], [1, 2]]


@every_g
@weighted
def test_fedprimaldual_is_its_specification(g, weights):
    clients, x0 = random_clients(3, n=4, d=3, convex=True)
    w, solve = shares(clients, weights), references.descent(3, 0.05)
    rows = references.fedprimaldual(in_numpy(clients), x0, COHORTS, 0.4, 0.9, 1.7, prox_of(g), w, solve)
    algorithm = FedPrimalDual(rho=0.4, sigma=0.9, lam=1.7, g=g, weights=weights)
    ours = simulate(algorithm, clients, x0, cohorts=COHORTS, solver=GradientDescent(3, 0.05))
    for server, states, row in zip(ours.server, ours.clients, rows, strict=True):
        close(server.x_bar, row.x_bar, 1e-14)
        close(server.z_bar, row.z_bar, 1e-14)
        close(torch.stack([s.z_i for s in states]), row.z, 1e-14)


@every_g
@weighted
@pytest.mark.parametrize("start", ["server", "local"])
def test_fedadmm_over_the_seen_is_its_specification(g, weights, start):
    clients, x0 = random_clients(5, n=4, d=3, convex=True)
    w, solve = shares(clients, weights), references.descent(3, 0.05)
    rows = references.fedadmm_seen(in_numpy(clients), x0, COHORTS, 2.0, prox_of(g), w, start, solve)
    algorithm = FedADMM(eta=2.0, g=g, weights=weights, mean="seen", start=start)
    ours = simulate(algorithm, clients, x0, cohorts=COHORTS, solver=GradientDescent(3, 0.05))
    close(torch.stack([server.x_bar for server in ours.server]), np.stack(rows), 1e-14)


def x_bars(algorithm, clients, x0, cohorts, solver=None):
    history = simulate(algorithm, clients, x0, cohorts=cohorts, solver=solver)
    return torch.stack([server.x_bar for server in history.server])


@weighted
def test_j1_active_fedadmm_without_g_is_feddyn(weights):
    clients, x0 = random_clients(1, n=4, d=3, convex=True)
    for solver in (Exact(), GradientDescent(3, 0.05)):
        ours = x_bars(FedADMM(eta=2.0, mean="active", weights=weights), clients, x0, COHORTS, solver)
        close(ours, x_bars(FedDyn(2.0, weights=weights), clients, x0, COHORTS, solver), 1e-14)


@every_g
@weighted
@pytest.mark.parametrize("mean", ["seen", "active"])
def test_j2_with_all_clients_every_mean_is_the_papers(g, weights, mean):
    clients, x0 = random_clients(2, n=4, d=3, convex=True)
    full = [range(4)] * 8
    for solver in (Exact(), GradientDescent(3, 0.05)):
        ours = x_bars(FedADMM(eta=2.0, g=g, weights=weights, mean=mean), clients, x0, full, solver)
        close(ours, x_bars(FedADMM(eta=2.0, g=g, weights=weights), clients, x0, full, solver), 1e-14)


@weighted
def test_from_the_round_that_sees_the_last_client_on_the_mean_over_the_seen_is_the_papers(weights):
    """The server's memory is the paper's all the time; the model is, once everybody has been seen."""
    clients, x0 = random_clients(2, n=4, d=3, convex=True)
    run = simulate(FedADMM(eta=2.0, mean="seen", weights=weights), clients, x0, cohorts=COHORTS)
    for server, states in zip(run.server, run.clients, strict=True):
        mean = sum(float(w) * s.x_hat_i for w, s in zip(shares(clients, weights), states, strict=True))
        close(server.x_tilde, mean, 1e-14)
    close(run.server[5].x_bar, run.server[5].x_tilde, 1e-15)  # clients 0, 2, 3 and 1 have been seen in rounds 0 to 4
    assert float((run.server[4].x_bar - run.server[4].x_tilde).norm()) > 1e-2


def test_j3_the_active_mean_is_minibatch_point_saga():
    clients, x0 = random_clients(4, n=4, d=3, convex=True)
    eta, run = 2.0, simulate(FedADMM(eta=2.0, mean="active"), clients, x0, cohorts=COHORTS)
    p, table = x0.numpy(), np.zeros((4, 3))
    for k, cohort in enumerate(COHORTS):
        if cohort:
            points = [p + (table[i] - table.mean(0)) / eta for i in cohort]
            found = [np.linalg.solve(f.A.numpy() + eta * np.eye(3), f.b.numpy() + eta * v)
                     for f, v in zip([clients[i] for i in cohort], points, strict=True)]  # fmt: skip
            for i, x, v in zip(cohort, found, points, strict=True):
                table[i] = eta * (v - x)
            p = np.mean(found, 0)
        close(run.server[k + 1].x_bar, p - table.mean(0) / eta, 1e-14)


@pytest.mark.parametrize("rho", [0.0, 0.7])
def test_j5_calibrated_duals_are_means_of_gradients_on_the_path(rho):
    clients, x0 = random_clients(6, n=1, d=3, convex=True)
    lr, steps = 0.05, 7
    sigma = 1 / (lr * steps) if rho == 0 else rho / (1 - (1 - lr * rho) ** steps)
    history = simulate(FedPrimalDual(rho=rho, sigma=sigma, lam=0.3), clients, x0, rounds=3,
                       solver=GradientDescent(steps, lr))  # fmt: skip
    for before, after, server in zip(history.clients, history.clients[1:], history.server, strict=False):
        (A, b), x, slopes = in_numpy(clients)[0], server.x_bar.numpy(), []
        z, x_bar = before[0].z_i.numpy(), server.x_bar.numpy()
        for _ in range(steps):
            slopes.append(A @ x - b)
            x = x - lr * (slopes[-1] + z + rho * (x - x_bar))
        factors = (1 - lr * rho) ** np.arange(steps - 1, -1, -1.0)
        close(after[0].z_i, -(factors / factors.sum()) @ np.array(slopes), 1e-14)


@weighted
@pytest.mark.parametrize("mu", [0.0, 0.6])
def test_j6_without_dual_steps_it_is_fedavg_and_fedprox(weights, mu):
    clients, x0 = random_clients(7, n=4, d=3, convex=True)
    solver, baseline = GradientDescent(3, 0.05), FedProx(mu, weights=weights) if mu else FedAvg(weights=weights)
    slow = FedPrimalDual(rho=mu, sigma=1e-12, lam=1.0, weights=weights)
    close(x_bars(slow, clients, x0, COHORTS, solver), x_bars(baseline, clients, x0, COHORTS, solver), 1e-10)


@weighted
def test_j7_calibrated_duals_walked_from_p_are_scaffold(weights):
    """Clients start at p = x_bar - lam z_bar with the linear term z_i - z_bar."""
    clients, x0 = random_clients(8, n=4, d=3, convex=True)
    lr, steps, w = 0.05, 3, shares(clients, weights)
    tau, solve = lr * steps, references.descent(steps, lr)
    p, z = x0.numpy(), np.zeros((4, 3))
    for vectors in (1, 2):
        scaffold = Scaffold(weights=weights, vectors=vectors)
        run = simulate(scaffold, clients, x0, cohorts=COHORTS, solver=GradientDescent(steps, lr))
        p, z = x0.numpy(), np.zeros((4, 3))
        for k, cohort in enumerate(COHORTS):
            if cohort:
                x_bar, lam = p + tau * (w @ z), tau
                linear = {i: z[i] - (x_bar - p) / lam for i in cohort}
                d = {i: solve(in_numpy(clients)[i], p, linear[i], 0.0, p) - p for i in cohort}
                for i in cohort:
                    z[i] = linear[i] + d[i] / tau
                p = p + sum(w[i] * d[i] for i in cohort) / sum(w[i] for i in cohort)
            close(run.server[k + 1].x_bar, p, 1e-14)
            close(run.server[k + 1].c, -w @ z, 1e-14)


@every_g
@pytest.mark.parametrize("algorithm", [FedADMM(eta=2.0, mean="active"), FedADMM(eta=2.0, mean="seen"),
                                       FedPrimalDual(rho=2.0, sigma=1.0, lam=0.75)], ids=str)  # fmt: skip
def test_j8_limits_are_stationary_with_three_of_eight(algorithm, g):
    clients, x0 = random_clients(9, n=8, d=2, convex=True)
    algorithm = replace(algorithm, g=g, weights="samples")
    run = simulate(algorithm, clients, x0, rounds=600, sampler=Uniform(3))
    slope = sum(float(w) * f.grad(run.x_bar) for w, f in zip(shares(clients, "samples"), clients, strict=True))
    close(gradient_mapping(algorithm, run.x_bar, slope, 2.0), torch.zeros(2), 1e-12)


def test_auto_eta_is_a_number_over_the_planned_step_sizes():
    clients, x0 = random_clients(1, n=4, d=3, convex=True)
    for mean, factor in (("all", 1.0), ("seen", 1.0), ("active", 0.3)):
        auto = x_bars(FedADMM(eta="auto", mean=mean), clients, x0, COHORTS, GradientDescent(3, 0.05))
        number = x_bars(FedADMM(eta=factor / (3 * 0.05), mean=mean), clients, x0, COHORTS, GradientDescent(3, 0.05))
        assert torch.equal(auto, number)
    assert hyper_parameters(FedADMM(eta="auto").planned(2.0))["eta"] == 0.5
    with pytest.raises(ValueError, match=r"planned sum.*give eta a number"):
        simulate(FedADMM(eta="auto"), clients, x0, rounds=1)
    with pytest.raises(ValueError, match=r"Give sigma= and lam="):
        simulate(FedPrimalDual(), clients, x0, rounds=1)


def test_scaffold_with_one_vector_refuses_visits_of_unequal_length():
    clients, x0 = random_clients(1, n=2, d=3, convex=True)
    unequal = [GradientDescent(3, 0.05), GradientDescent(4, 0.05)]
    with pytest.raises(ValueError, match="visits of equal length"):
        simulate(Scaffold(vectors=1), clients, x0, rounds=1, solver=unequal)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: FedADMM(eta="1"), "positive number or \"auto\", got '1'"),
        (lambda: FedADMM(mean="mine"), "mean must be one of all, seen, active"),
        (lambda: FedADMM(mean="active", start="local"), "needs start='server'"),
        (lambda: FedADMM(mean="active", alpha=1.5), "needs alpha=1"),
        (lambda: FedPrimalDual(a=0), "FedPrimalDual.a must be positive"),
        (lambda: FedPrimalDual(lam=-1), "FedPrimalDual.lam must be positive"),
        (lambda: FedPrimalDual(rho=-1), "FedPrimalDual.rho must be non-negative"),
        (lambda: Scaffold(option=1, vectors=1), "needs option=2"),
        (lambda: Scaffold(vectors=3), "vectors must be 1 or 2"),
        (lambda: FedDyn(weights="mine"), "weights must be one of"),
    ],
)
def test_wrong_settings_are_named(build, message):
    with pytest.raises(ValueError, match=message):
        build()
