"""FedADMM's relatives, corrected and proximal steps: the same method in other variables."""

from dataclasses import dataclass, replace
from itertools import islice

import numpy as np
import pytest
import torch
from helpers.problems import LAW, WORK, close, federations, gradient, identical, random_clients, schedule, seeds
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import (
    FedADMM,
    FedAvg,
    FedDR,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedPD,
    FedSplit,
    ParallelDRS,
    Scaffold,
    douglas_rachford,
)
from lightning_fed.core import Reply, Total
from lightning_fed.laboratory.quadratic import Oracle
from lightning_fed.prox import L1, Box, Zero

ETA = 5.0  # above the largest curvature of `random_clients`, which is 4
REGULARISERS = [Zero(), L1(0.2), Box(-0.3, 0.4)]
STARTS = ["local", "server", "centre"]
SOLVERS = [Exact(), GradientDescent(3, 0.05)]
regularisers, starts, solvers = st.sampled_from(REGULARISERS), st.sampled_from(STARTS), st.sampled_from(SOLVERS)
relaxations = st.sampled_from([0.5, 1.0, 1.5, 2.0])


def column(history, name):
    """One variable of every client after every round."""
    return np.array([[getattr(state, name).numpy() for state in states] for states in history.clients])


def models(history):
    return np.array([server.x_bar.numpy() for server in history.server])


def full(clients, x0, solver, rounds=8):
    return {"clients": clients, "x0": x0, "rounds": rounds, "solver": solver}


@given(federations(), regularisers, relaxations, starts, solvers)
@LAW
def test_parallel_drs_is_feddr_with_everybody(federation, g, alpha, start, solver):
    clients, x0, _ = federation
    common = {"eta_hat": 1 / ETA, "alpha": alpha, "g": g, "start": start}
    ours = simulate(ParallelDRS(**common), **full(clients, x0, solver))
    assert identical(ours.server, simulate(FedDR(**common), **full(clients, x0, solver)).server)


@given(federations(), regularisers, relaxations)
@LAW
def test_feddr_with_everybody_is_two_operator_splitting_on_the_product_space(federation, g, alpha):
    clients, x0, _ = federation

    def prox_f(points, t):
        return torch.stack(
            [Oracle(f, Exact()).solve(v, rho=1 / t, center=v).x for f, v in zip(clients, points, strict=True)]
        )

    def prox_g(points, t):
        return g.prox(points.mean(0), t).expand_as(points)

    product = douglas_rachford(prox_f, prox_g, x0.repeat(len(clients), 1), 1 / ETA, alpha)
    ours = simulate(FedDR(eta_hat=1 / ETA, alpha=alpha, g=g), **full(clients, x0, Exact()))
    for k, step in enumerate(islice(product, 8), start=1):
        close(ours.server[k].x_bar, step.z[0])
        close(column(ours, "x_i")[k], step.y)


@given(seeds, regularisers, st.sampled_from([0.5, 1.0, 1.5]))
@LAW
def test_fedadmm_with_one_client_is_two_operator_splitting(seed, g, alpha):
    (f,), x0 = random_clients(seed, n=1, d=3, convex=True)
    steps = douglas_rachford(
        lambda v, t: Oracle(f, Exact()).solve(v, rho=1 / t, center=v).x, g.prox, x0, 1 / ETA, alpha
    )
    ours = simulate(FedADMM(eta=ETA, alpha=alpha, g=g), [f], x0, rounds=20)
    close(models(ours)[1:], [step.z.numpy() for step in islice(steps, 20)])


@dataclass(frozen=True)
class ProjectedFedDR(FedDR):
    """FedDR whose first broadcast is prox(x0), as FedDR-II's is."""

    def init_server(self, x0):
        server = super().init_server(x0)
        return replace(server, x_bar=self.g.prox(x0, self.eta_hat))


@given(federations(), regularisers, starts, solvers)
@LAW
def test_feddr_ii_with_fresh_uploads_is_feddr(federation, g, start, solver):
    clients, x0, cohorts = federation
    common, how = {"eta_hat": 1 / ETA, "g": g, "start": start}, {"x0": x0, "cohorts": cohorts, "solver": solver}
    two = simulate(FedDRII(**common), clients, **how)
    one = simulate(ProjectedFedDR(**common), clients, **how)
    close(models(two), models(one))
    close(column(two, "x_i"), column(one, "x_i"))
    close(column(two, "x_hat_i"), column(one, "x_hat_i"))
    close(column(two, "w_i")[-1], (column(one, "x_i") - column(one, "y_i"))[-1])


@given(federations(), regularisers, starts, solvers)
@LAW
def test_feddr_ii_that_uploads_first_is_feddr_half_a_round_later_with_everybody(federation, g, start, solver):
    clients, x0, _ = federation
    common = {"eta_hat": 1 / ETA, "g": g, "start": start}
    literal = simulate(FedDRII(**common, mode="upload_first"), **full(clients, x0, solver))
    plain = simulate(ProjectedFedDR(**common), **full(clients, x0, solver))
    close(models(literal)[1:], models(plain)[:-1])
    close(column(literal, "x_i"), column(plain, "x_i"))


def test_feddr_ii_that_uploads_first_is_another_method_with_a_part_of_the_clients():
    clients, x0 = random_clients(7, n=4, d=3)
    how = {"x0": x0, "cohorts": schedule(3, 4, 20)}
    literal = simulate(FedDRII(eta_hat=1 / 9.0, mode="upload_first"), clients, **how)
    plain = models(simulate(FedDR(eta_hat=1 / 9.0), clients, **how))
    for shift in (0, 1):
        assert np.abs(models(literal)[shift:] - plain[: 21 - shift]).max() > 0.02


@given(federations(), starts, solvers, st.floats(4.5, 12.0))
@LAW
def test_fedadmm_is_fedpd_is_feddyn_with_everybody(federation, start, solver, eta):
    clients, x0, _ = federation
    how = full(clients, x0, solver, rounds=12)
    admm = simulate(FedADMM(eta=eta, start=start), **how)
    pd = simulate(FedPD(eta_hat=1 / eta, start=start), **how)
    dyn = simulate(FedDyn(alpha=eta, start=start), **how)
    for other, dual, sign in ((pd, "lam_i", 1), (dyn, "q_i", -1)):
        close(models(other), models(admm))
        close(column(other, "x_i"), column(admm, "x_i"))
        close(sign * column(other, dual), column(admm, "z_i"))
    close([s.h.numpy() for s in dyn.server], -column(admm, "z_i").mean(1))


def test_feddyn_is_not_fedadmm_with_a_part_of_the_clients():
    clients, x0 = random_clients(7, n=4, d=3)
    how = {"x0": x0, "cohorts": schedule(3, 4, 20)}
    assert (
        np.abs(models(simulate(FedDyn(9.0), clients, **how)) - models(simulate(FedADMM(9.0), clients, **how))).max()
        > 0.1
    )


@given(federations(convex=True), starts, solvers)
@LAW
def test_fedsplit_is_feddr_and_fedadmm_with_alpha_two_and_everybody(federation, start, solver):
    clients, x0, _ = federation
    how = full(clients, x0, solver, rounds=12)
    split = simulate(FedSplit(s=1 / ETA, start=start), **how)
    for other in (FedDR(eta_hat=1 / ETA, alpha=2.0, start=start), FedADMM(eta=ETA, alpha=2.0, start=start)):
        theirs = simulate(other, **how)
        close(models(split), models(theirs))
        close(column(split, "x_i"), column(theirs, "x_i"))
        close(column(split, "z_i"), column(theirs, "x_hat_i"))


class FrozenScaffold(Scaffold):
    """SCAFFOLD whose variates stay zero."""

    def client_step(self, client, down, local):
        reply = super().client_step(client, down, local)
        return Reply(client, replace(reply.message, c_delta_i=0 * reply.message.c_delta_i), reply.x_i)


@pytest.mark.parametrize("option", [1, 2])
@given(federations(), st.floats(0.2, 1.5))
@LAW
def test_scaffold_with_variates_frozen_at_zero_is_fedavg_and_so_is_its_first_round(option, federation, server_lr):
    clients, x0, cohorts = federation
    how = {"x0": x0, "cohorts": cohorts, "solver": GradientDescent(3, 0.05)}
    avg = models(simulate(FedAvg(server_lr=server_lr, weights="uniform"), clients, **how))
    close(models(simulate(FrozenScaffold(option, server_lr), clients, **how)), avg, 0)
    first = next((k for k, cohort in enumerate(cohorts) if cohort), 0) + 1
    close(models(simulate(Scaffold(option, server_lr), clients, **how))[: first + 1], avg[: first + 1], 0)


@pytest.mark.parametrize("algorithm", [Scaffold(1), Scaffold(2), FedLin()], ids=str)
@given(federations())
@LAW
def test_one_corrected_step_of_everybody_is_gradient_descent(algorithm, federation):
    clients, x, _ = federation
    for server in simulate(algorithm, **full(clients, x, GradientDescent(1, 0.1), rounds=12)).server:
        close(server.x_bar, x)
        x = x - 0.1 * gradient(clients, x)


@given(federations(rounds=12), st.floats(0.2, 1.5))
@LAW
def test_both_options_of_scaffold_agree_for_one_step_whoever_takes_part(federation, server_lr):
    clients, x0, cohorts = federation
    how = {"x0": x0, "cohorts": cohorts, "solver": GradientDescent(1, 0.1)}
    one, two = (simulate(Scaffold(option, server_lr), clients, **how) for option in (1, 2))
    close(models(one), models(two))
    close(column(one, "c_i"), column(two, "c_i"))


@given(federations(), st.integers(1, 4))
@LAW
def test_fedlin_is_scaffold_whose_variates_are_refreshed_before_the_local_steps(federation, steps):
    clients, x0, _ = federation
    solver, scaffold = GradientDescent(steps, 0.05), Scaffold(1)
    lin = simulate(FedLin(), **full(clients, x0, solver))
    server, n = scaffold.init_server(x0), len(clients)
    for k in range(1, 9):
        server = replace(server, c=gradient(clients, server.x_bar))
        states = [replace(scaffold.init_client(x0), c_i=f.grad(server.x_bar)) for f in clients]
        down = scaffold.broadcast(server, WORK)
        replies = [scaffold.client_step(s, down, Oracle(f, solver)) for s, f in zip(states, clients, strict=True)]
        total = replace(
            replies[0].message,
            delta_i=sum(r.message.delta_i for r in replies),
            c_delta_i=sum(r.message.c_delta_i for r in replies),
        )
        server = scaffold.server_step(server, Total(total, n, n, n, down))
        close(lin.server[k].x_bar, server.x_bar)


def test_scaffold_with_the_variates_of_last_round_is_not_fedlin():
    clients, x0 = random_clients(7, n=4, d=3)
    lin, one = (models(simulate(a, **full(clients, x0, GradientDescent(3, 0.1)))) for a in (FedLin(), Scaffold(1)))
    assert np.abs(lin - one).max() > 1e-3


@pytest.mark.parametrize("weights", ["uniform", "samples"])
@given(federations(), st.integers(1, 4), st.floats(0.2, 1.5))
@LAW
def test_fedmid_and_feddualavg_without_a_regulariser_are_fedavg(weights, federation, steps, server_lr):
    clients, x0, cohorts = federation
    how = {"x0": x0, "cohorts": cohorts, "solver": GradientDescent(steps, 0.07)}
    avg = models(simulate(FedAvg(server_lr=server_lr, weights=weights), clients, **how))
    for kind in (FedMid, FedDualAvg):
        close(models(simulate(kind(server_lr=server_lr, weights=weights), clients, **how)), avg, 1e-13)


@given(seeds)
@LAW
def test_one_client_with_one_step_does_dual_averaging_and_but_for_constraints_no_proximal_gradient(seed):
    (f,), x0 = random_clients(seed, n=1, d=3, convex=True)
    how = {"x0": x0, "rounds": 8, "solver": GradientDescent(1, 0.1)}
    for g in REGULARISERS[1:]:
        mid = simulate(FedMid(g=g), [f], **how)
        lazy = simulate(FedDualAvg(g=g), [f], **how)
        x, z = x0, x0
        for k in range(1, 9):
            x = g.prox(g.prox(x - 0.1 * f.grad(x), 0.1), 0.1)
            z = z - 0.1 * f.grad(g.prox(z, 0.1 * (k - 1)) if k > 1 else z)
            close(mid.server[k].x_bar, x, 1e-13)
            close(lazy.server[k].x_bar, g.prox(z, 0.1 * k), 1e-13)
    once = REGULARISERS[1].prox(x0 - 0.1 * f.grad(x0), 0.1)
    twice = simulate(FedMid(g=REGULARISERS[1]), [f], **{**how, "rounds": 1}).x_bar
    assert bool((once.abs() < 0.02).all()) or not torch.allclose(once, twice, atol=1e-6)
