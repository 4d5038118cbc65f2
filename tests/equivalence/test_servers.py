"""FedAvgM, FedAdam, FedYogi, FedAdagrad and FedNova: definitions, numbers by hand, and identities."""

import math

import numpy as np
import pytest
import torch
from helpers import references, server_references
from helpers.problems import EACH, close, federations, identical, in_numpy, random_clients
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from lightning_fed import Exact, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedAdagrad, FedAdam, FedAvg, FedAvgM, FedNova, FedProx, FedYogi
from lightning_fed.core.layout import Layout
from lightning_fed.core.reach import Reach

STEPS, LR = 3, 0.05
DESCENT = GradientDescent(STEPS, LR)
every_weights = st.sampled_from(["samples", "uniform"])


def counts_of(clients, weights):
    return [f.num_examples for f in clients] if weights == "samples" else None


def models(history):
    return [server.x_bar.numpy() for server in history.server]


def constant(*slopes):
    """A client whose every gradient is minus ``slopes``, so that one step of length 1 changes x by them."""
    return Quadratic(torch.zeros(len(slopes), len(slopes)).double(), slopes)


def moves(algorithm, *slopes, rounds):
    """The models of a run in which every round has the same change."""
    history = simulate(algorithm, [constant(*slopes)], rounds=rounds, solver=GradientDescent(1, 1.0))
    return [server.x_bar.tolist() for server in history.server]


@pytest.mark.parametrize("kind", [FedAdagrad, FedAdam, FedYogi])
@given(federations(), every_weights, st.sampled_from([0.0, 0.5, 0.9]))
@EACH
def test_adaptive_servers_are_their_definitions(kind, federation, weights, beta1):
    clients, x0, cohorts = federation
    decay = {} if kind is FedAdagrad else {"beta2": 0.8}
    ours = kind(server_lr=0.3, tau=0.05, beta1=beta1, weights=weights, **decay)
    step = server_references.adaptive(kind.__name__, 0.3, 0.05, beta1, **decay)
    how = counts_of(clients, weights), references.descent(STEPS, LR)
    rows = server_references.fedopt(in_numpy(clients), x0, cohorts, step, *how)
    close(models(simulate(ours, clients, x0, cohorts=cohorts, solver=DESCENT)), [row.x_bar for row in rows])


@given(federations(), every_weights, st.sampled_from([0.0, 0.5, 0.9]))
@EACH
def test_fedavgm_is_its_definition_and_without_momentum_fedavg(federation, weights, beta):
    clients, x0, cohorts = federation
    how = {"cohorts": cohorts, "solver": DESCENT}
    ours = simulate(FedAvgM(beta=beta, server_lr=0.7, weights=weights), clients, x0, **how)
    args = counts_of(clients, weights), references.descent(STEPS, LR)
    rows = server_references.fedopt(
        in_numpy(clients), x0, cohorts, lambda changes: 0.7 * server_references.decayed(beta, changes), *args
    )
    close(models(ours), [row.x_bar for row in rows])
    if not beta:
        close(models(ours), models(simulate(FedAvg(server_lr=0.7, weights=weights), clients, x0, **how)), 1e-13)


def test_fedavgm_swings_past_the_minimum_as_by_hand():
    history = simulate(FedAvgM(beta=0.5), [Quadratic.scalar(1.0, 1.0)], rounds=4)  # Delta = 1 - x, exact solves
    assert [float(s.v) for s in history.server] == [0.0, 1.0, 0.5, -0.25, -0.375]
    assert [float(s.x_bar) for s in history.server] == [0.0, 1.0, 1.5, 1.25, 0.875]


def test_adagrad_after_equal_changes_in_closed_form():
    found = moves(FedAdagrad(server_lr=0.5, tau=0.3), 2.0, -0.1, rounds=5)
    for rounds, x in enumerate(found):
        for entry, change in zip(x, (2.0, -0.1), strict=True):
            terms = [0.5 * change / (math.sqrt(0.09 + t * change**2) + 0.3) for t in range(1, rounds + 1)]
            assert entry == pytest.approx(sum(terms), abs=1e-14)


def test_adam_after_equal_changes_in_closed_form():
    found = moves(FedAdam(server_lr=0.5, tau=0.3, beta1=0.9, beta2=0.8), 2.0, -0.1, rounds=5)
    for rounds, x in enumerate(found):
        for entry, change in zip(x, (2.0, -0.1), strict=True):
            means = [(1 - 0.9**t) * change for t in range(1, rounds + 1)]  # not divided by 1 - 0.9^t
            squares = [0.8**t * 0.09 + (1 - 0.8**t) * change**2 for t in range(1, rounds + 1)]
            terms = [0.5 * m / (math.sqrt(v) + 0.3) for m, v in zip(means, squares, strict=True)]
            assert entry == pytest.approx(sum(terms), abs=1e-14)


def test_yogi_adds_or_subtracts_a_part_of_the_square():
    algorithm = FedYogi(server_lr=1.0, tau=0.5, beta1=0.0, beta2=0.75)
    history = simulate(algorithm, [constant(0.25, 2.0)], rounds=3, solver=GradientDescent(1, 1.0))
    # v = 1/4 against 1/16 falls by 1/64 a round; against 4 it rises by 1
    assert [s.v.tolist() for s in history.server] == [[(16 - t) / 64, 0.25 + t] for t in range(4)]
    wanted = [0.25 / (math.sqrt((16 - t) / 64) + 0.5) for t in (1, 2, 3)]
    assert float(history.x_bar[0]) == pytest.approx(sum(wanted), abs=1e-14)


@pytest.mark.parametrize("kind", [FedAdam, FedYogi])
def test_while_squares_are_what_v_is_the_server_takes_plain_steps(kind):
    adaptive = moves(kind(server_lr=0.25, beta1=0.0, tau=0.5), 0.5, -0.5, rounds=4)  # Delta^2 = tau^2 = v
    assert adaptive == moves(FedAvg(server_lr=0.25), 0.5, -0.5, rounds=4)  # 0.25 / (sqrt(v) + tau)
    assert adaptive[-1] == [0.5, -0.5]


def test_the_first_move_of_small_and_large_changes():
    for change in (1e-9, 1e9):
        (_, (x,)) = moves(FedAdam(beta1=0.0, beta2=0.0, tau=0.5), change, rounds=1)
        assert x == pytest.approx(0.01 * change / (change + 0.5), rel=1e-12)  # lr times the sign, where it is large


@pytest.mark.parametrize("algorithm", [FedAvgM(), FedAdam(tau=0.5), FedYogi(tau=0.5), FedAdagrad(tau=0.5)], ids=repr)
def test_a_parameter_that_is_thawed_starts_with_fresh_moments(algorithm):
    module = nn.Sequential(nn.Linear(2, 1, bias=False), nn.Linear(1, 3, bias=False))
    whole = Layout.of(module)
    module[1].requires_grad_(False)
    part = Layout.of(module)
    used = {name: torch.tensor([7.0, 8.0]).double() for name in vars(algorithm.init_server(torch.zeros(2)))}
    fresh = algorithm.init_server(torch.ones(5).double())
    grown = vars(whole.transplant(part, type(fresh)(**used), fresh))
    assert grown.pop("x_bar").tolist() == [7.0, 8.0, 1.0, 1.0, 1.0]
    assert grown.pop("v").tolist() == [7.0, 8.0, *[0.0 if isinstance(algorithm, FedAvgM) else 0.25] * 3]
    assert all(moment.tolist() == [7.0, 8.0, 0.0, 0.0, 0.0] for moment in grown.values())


# -- FedNova -------------------------------------------------------------------------------------------------------

LOCAL = {"plain": {}, "momentum": {"momentum": 0.9}, "penalty": {"mu": 2.0}}


def nova(local, **kwargs):
    return FedNova(mu=local.get("mu", 0.0), **kwargs)


def solvers(steps, local):
    return [GradientDescent(t, LR, momentum=local.get("momentum", 0.0)) for t in steps]


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("tau_eff", ["steps", "norm"])
@given(federations(), every_weights)
@EACH
def test_fednova_is_its_definition(local, tau_eff, federation, weights):
    clients, x0, cohorts = federation
    terms, steps = LOCAL[local], [1 + 2 * i for i in range(len(clients))]
    found = simulate(
        nova(terms, tau_eff=tau_eff, weights=weights), clients, x0, cohorts=cohorts, solver=solvers(steps, terms)
    )
    how = {**terms, "tau_eff": tau_eff, "counts": counts_of(clients, weights)}
    close(
        models(found),
        [row.x_bar for row in server_references.fednova(in_numpy(clients), x0, cohorts, steps, LR, **how)],
    )


@pytest.mark.parametrize("steps", [1, 2, 7, 40])
def test_the_weight_of_all_gradients_in_closed_form(steps):
    b, lr, mu = 0.9, 0.1, 2.0
    assert Reach.of(steps, lr) == pytest.approx(lr * steps, rel=1e-14)
    momentum = (steps - b * (1 - b**steps) / (1 - b)) / (1 - b)
    assert Reach.of(steps, lr, momentum=b) == pytest.approx(lr * momentum, rel=1e-12)
    assert Reach.of(steps, lr, rho=mu) == pytest.approx((1 - (1 - lr * mu) ** steps) / mu, rel=1e-12)
    assert Reach.of(steps, lr, b) == pytest.approx(
        lr * server_references.weights_of_gradients(steps, lr, b).sum(), rel=1e-12
    )


def test_step_sizes_and_momenta_that_change_are_counted_as_they_were():
    decaying, cycled = Reach(rho=1.0), Reach()
    for lr in (0.5, 0.25):
        decaying.step(lr)
    assert decaying.length == 0.625  # a = (1 - 0.25) 0.5, 0.25
    for lr, momentum in ((1.0, 0.0), (0.5, 0.5), (0.25, 0.25)):
        cycled.step(lr, momentum)
    assert cycled.length == 1 + 0.5 * 1.5 + 0.25 * (0.25 * 1.5 + 1)
    assert math.isnan(Reach.of(2, 0.6, rho=2.0))  # the first gradient would count -0.2 times
    assert math.isnan(Reach.of(1, 0.1, momentum=0.9, rho=0.1))


@pytest.mark.parametrize("local", LOCAL)
@given(federations(), every_weights)
@EACH
def test_with_equal_numbers_of_steps_fednova_is_fedavg_or_fedprox(local, federation, weights):
    clients, x0, cohorts = federation
    terms, how = LOCAL[local], {"server_lr": 0.7, "weights": weights}
    args = {"cohorts": cohorts, "solver": solvers([STEPS] * len(clients), LOCAL[local])}
    plain = simulate(FedProx(mu=terms.get("mu", 0.0), **how), clients, x0, **args)
    close(models(simulate(nova(terms, tau_eff="norm", **how), clients, x0, **args)), models(plain), 1e-12)
    longer = STEPS / server_references.weights_of_gradients(STEPS, LR, **terms).sum()
    scaled = simulate(FedProx(mu=terms.get("mu", 0.0), **{**how, "server_lr": 0.7 * longer}), clients, x0, **args)
    close(models(simulate(nova(terms, **how), clients, x0, **args)), models(scaled), 1e-12)


def test_with_steps_in_proportion_to_samples_fednova_is_fedavg_with_equal_weights():
    clients, x0 = random_clients(5, n=4, d=3, convex=True)
    sizes = np.array([f.num_examples for f in clients])
    args = {"rounds": 5, "solver": [GradientDescent(int(n), 0.02) for n in sizes]}
    longer = len(sizes) * (sizes**2).sum() / sizes.sum() ** 2
    even = simulate(FedAvg(weights="uniform", server_lr=longer), clients, x0, **args)
    close(models(simulate(FedNova(), clients, x0, **args)), models(even), 1e-12)


@pytest.mark.parametrize("lr", [0.05, 1e-4])
def test_unlike_numbers_of_steps_bias_fedavg_and_not_fednova(lr):
    curvatures, minima, p = np.array([1.0, 2.0, 4.0]), np.array([2.0, 1.0, -3.0]), np.array([0.2, 0.3, 0.5])
    steps, sizes = np.array([30, 1, 3]), (2, 3, 5)
    clients = [Quadratic.scalar(a, a * m, n) for a, m, n in zip(curvatures, minima, sizes, strict=True)]
    pulls = 1 - (1 - lr * curvatures) ** steps  # x_i - x = pulls (minimum - x)
    weights = {"FedAvg": p * pulls, "FedNova": p * pulls / (lr * steps)}
    limits = {name: w @ minima / w.sum() for name, w in weights.items()}
    solver = [GradientDescent(int(t), lr) for t in steps]
    for algorithm in (FedAvg(), FedNova()):  # a limit is where nothing moves, and all else is pulled towards it
        limit = limits[type(algorithm).__name__]
        stays, nears = (simulate(algorithm, clients, [limit + e], rounds=1, solver=solver) for e in (0.0, 1.0))
        close(stays.x_bar, [limit], 1e-14)
        assert 0 < float(nears.x_bar) - limit < 1
    if lr < 1e-3:  # a drift of the order of lr is left
        true, counted = (w @ minima / w.sum() for w in (p * curvatures, p * curvatures * steps))
        assert (round(true, 2), round(counted, 2)) == (-1.79, -0.43)
        assert abs(limits["FedNova"] - true) < 0.01
        assert abs(limits["FedAvg"] - counted) < 0.01  # the minimiser of sum p_i tau_i f_i


def test_stragglers_count_with_the_steps_that_they_took():
    clients, x0 = random_clients(1, n=4, d=2, convex=True)
    how = {"rounds": 6, "solver": GradientDescent(9, LR), "seed": 4}
    history = simulate(FedNova(stragglers=0.7), clients, x0, **how)
    taken = [[answer.steps for answer in by_client.values()] for by_client in history.answers]
    assert len({tuple(steps) for steps in taken}) > 2
    for k, steps in enumerate(taken):
        (_, row) = server_references.fednova(
            in_numpy(clients), history.server[k].x_bar, [range(4)], steps, LR, counts=counts_of(clients, "samples")
        )
        close(history.server[k + 1].x_bar, row.x_bar, 1e-13)


def test_a_visit_without_a_step_counts_as_no_direction():
    clients = [Quadratic.scalar(1.0, 0.0), Quadratic.scalar(1.0, 1.0)]
    work = [GradientDescent(5, 0.5, until=1.0), GradientDescent(4, 0.5)]
    history = simulate(FedNova(), clients, [1.0], rounds=1, solver=work)  # the first is good enough, the second at rest
    assert identical(history.server[1].x_bar, history.server[0].x_bar)


@pytest.mark.parametrize(
    ("algorithm", "solver", "about"),
    [
        (FedNova(), Exact(), "FedNova needs local steps of SGD whose weights a_i are known"),
        (FedNova(mu=30.0), DESCENT, r"one learning rate of at most 1 / mu, got mu=30\."),
        (FedNova(mu=1.0), GradientDescent(3, 0.1, momentum=0.5), r"needs plain gradient steps; omit momentum="),
    ],
    ids=["exact", "long steps", "momentum and penalty"],
)
def test_steps_whose_weights_are_unknown_are_refused(algorithm, solver, about):
    clients, x0 = random_clients(1, n=2, d=2, convex=True)
    with pytest.raises(ValueError, match=about):
        simulate(algorithm, clients, x0, rounds=1, solver=solver)
