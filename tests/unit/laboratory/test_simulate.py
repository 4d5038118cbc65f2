"""The laboratory, and the round it runs."""

from functools import partial

import pytest
import torch
from helpers.problems import WORK, BareEngine, Federation, close, golden, identical

from lightning_fed import Exact, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedADMM, FedAvg, FedDR
from lightning_fed.core.round import run_round
from lightning_fed.sampling import Bernoulli, Full, Uniform

CLIENTS, X0 = golden((5, 3, 2))
ADMM = FedADMM(eta=2.0)


def test_history_holds_every_state_from_the_start_on():
    history = simulate(ADMM, CLIENTS, X0, cohorts=[[0], [], [1, 2]])
    assert len(history) == 3
    assert (len(history.server), len(history.clients)) == (4, 4)
    assert all(len(states) == 3 for states in history.clients)
    assert torch.equal(history.server[0].x_bar, X0)
    assert torch.equal(history.x_bar, history.server[-1].x_bar)
    assert history.cohorts == [[0], [], [1, 2]]


def test_cohorts_are_sets_in_ascending_order():
    history = simulate(ADMM, CLIENTS, X0, cohorts=({2, 0}, (1, 1, 0), iter([2, 1])))
    assert history.cohorts == [[0, 2], [0, 1], [1, 2]]
    same = simulate(ADMM, CLIENTS, X0, cohorts=[[0, 2], [0, 1], [1, 2]])
    assert identical(history.server, same.server)


def test_without_a_sampler_everybody_takes_part():
    assert simulate(ADMM, CLIENTS, X0, rounds=2).cohorts == [[0, 1, 2], [0, 1, 2]]
    assert len(simulate(ADMM, CLIENTS, X0, rounds=0)) == 0


@pytest.mark.parametrize("sampler", [Full(), Uniform(2), Bernoulli(0.4)], ids=repr)
def test_a_sampler_decides_from_seed_and_round(sampler):
    history = simulate(ADMM, CLIENTS, X0, rounds=12, sampler=sampler, seed=3)
    assert history.cohorts == [sampler.cohort(3, 3, k) for k in range(12)]
    longer = simulate(ADMM, CLIENTS, X0, rounds=20, sampler=sampler, seed=3)
    assert longer.cohorts[:12] == history.cohorts
    assert identical(longer.server[:13], history.server)


def test_two_algorithms_with_one_seed_see_the_same_cohorts():
    how = {"rounds": 10, "sampler": Uniform(1), "seed": 8}
    assert simulate(ADMM, CLIENTS, X0, **how).cohorts == simulate(FedAvg(), CLIENTS, X0, **how).cohorts
    assert simulate(ADMM, CLIENTS, X0, **how).cohorts != simulate(ADMM, CLIENTS, X0, **{**how, "seed": 9}).cohorts


def test_the_first_model_is_zero_unless_given():
    assert torch.equal(simulate(ADMM, CLIENTS, rounds=0).x_bar, torch.zeros(2, dtype=torch.float64))
    assert torch.equal(simulate(ADMM, CLIENTS, [1, -1], rounds=0).x_bar, X0)
    assert simulate(ADMM, CLIENTS, X0.float(), rounds=2).x_bar.dtype == torch.float32
    single = [Quadratic(torch.eye(2), torch.ones(2))]
    assert simulate(ADMM, single, rounds=1).x_bar.dtype == torch.float32
    assert simulate(ADMM, single, [0.0, 1.0], rounds=1).x_bar.dtype == torch.float32


def test_solves_are_exact_unless_told_otherwise():
    exact, default = (simulate(ADMM, CLIENTS, X0, rounds=3, solver=s) for s in (Exact(), None))
    assert identical(exact.server, default.server)
    rough = simulate(ADMM, CLIENTS, X0, rounds=3, solver=GradientDescent(1, 0.1))
    assert not identical(exact.server, rough.server)


def test_the_first_model_is_not_modified():
    x0 = X0.clone()
    simulate(ADMM, CLIENTS, x0, rounds=3)
    assert torch.equal(x0, X0)


def test_a_full_start_is_part_of_the_initial_state_and_not_of_the_rounds():
    history = simulate(FedDR(eta_hat=0.5, init="prox"), CLIENTS, X0, cohorts=[[0]])
    assert len(history) == 1
    assert history.cohorts == [[0]]
    for f, state in zip(CLIENTS, history.clients[0], strict=True):
        close(state.y_i, X0, 0)
        close(f.grad(state.x_i) + 2 * (state.x_i - X0), [0.0, 0.0], 1e-14)


class Cubic:
    num_examples = 1

    def __call__(self, x):
        return (x**3).sum()

    def grad(self, x):
        return 3 * x**2


def test_any_loss_with_a_gradient_is_a_client():
    end = simulate(FedAvg(), [Cubic()], [1.0], rounds=1, solver=GradientDescent(1, 0.1)).x_bar
    assert end.dtype == torch.float64
    close(end, [0.7], 1e-15)
    with pytest.raises(ValueError, match=r"simulate needs x0= for clients of type Cubic\."):
        simulate(FedAvg(), [Cubic()], rounds=1)


def test_nobody_cannot_be_simulated():
    with pytest.raises(ValueError, match="simulate needs at least one client"):
        simulate(ADMM, [], rounds=1)


def test_either_rounds_or_cohorts_must_be_given():
    for both_or_neither in ({}, {"rounds": 1, "cohorts": [[0]]}):
        with pytest.raises(ValueError, match="one of rounds=, cohorts= and events="):
            simulate(ADMM, CLIENTS, X0, **both_or_neither)


@pytest.mark.parametrize("number", [0, 2, 4])
def test_solvers_are_one_for_all_or_one_for_each(number):
    each = [GradientDescent(i + 1, 0.1) for i in range(3)]
    mixed = simulate(FedAvg(), CLIENTS, X0, cohorts=[[1]], solver=each)
    assert identical(mixed.server, simulate(FedAvg(), CLIENTS, X0, cohorts=[[1]], solver=each[1]).server)
    with pytest.raises(ValueError, match=rf"simulate got {number} solvers for 3 clients\."):
        simulate(FedAvg(), CLIENTS, X0, rounds=1, solver=[GradientDescent(1, 0.1)] * number)


@pytest.mark.parametrize("rounds", [-1, 1.5, "3"], ids=repr)
def test_a_number_of_rounds_that_is_none_is_refused(rounds):
    with pytest.raises(ValueError, match=rf"rounds must be a whole number >= 0, got {rounds!r}"):
        simulate(ADMM, CLIENTS, X0, rounds=rounds)


@pytest.mark.parametrize("stranger", [3, -1, "a", 0.5], ids=repr)
def test_a_cohort_with_a_stranger_is_refused(stranger):
    with pytest.raises(ValueError, match=rf"cohorts\[1\] names client {stranger!r}; clients are 0 to 2\."):
        simulate(ADMM, CLIENTS, X0, cohorts=[[0], [stranger]])


def test_an_impossible_sampler_is_refused_before_the_first_round():
    with pytest.raises(ValueError, match="Cannot draw 4 clients per round: the federation has 3"):
        simulate(ADMM, CLIENTS, X0, rounds=1, sampler=Uniform(4))
    with pytest.raises(ValueError, match="has 2 probabilities for 3 clients"):
        simulate(ADMM, CLIENTS, X0, rounds=0, sampler=Bernoulli([0.5, 0.5]))


def test_a_round_counts_one_model_down_and_one_up_per_active_client():
    for x0, size in ((X0, 16), (X0.float(), 8)):
        for algorithm in (ADMM, FedDR(), FedAvg()):
            done = Federation(algorithm, CLIENTS, x0).outcome([0, 2])
            assert (done.bytes_down, done.bytes_up) == (2 * size, 2 * size)


def test_a_round_moves_nothing_by_itself():
    run = Federation(ADMM, CLIENTS, X0)
    server = run.server
    done = run.outcome([0, 1])
    assert run.server is server
    assert len(run.store) == 0
    assert list(done.states) == list(done.local_models) == list(done.losses) == list(done.steps) == [0, 1]
    assert not identical(done.server, server)


def test_a_round_reports_losses_and_steps_of_those_who_answered():
    run = Federation(ADMM, CLIENTS, X0, solver=GradientDescent(4, 0.1))
    done = run.outcome([1])
    assert done.steps == {1: 4}
    assert done.losses[1] == run.engine.oracles[1].solve(X0, rho=2.0, center=X0).loss
    empty = run.outcome([])
    assert empty.server is run.server
    assert empty.losses == empty.steps == {}


def test_a_round_weighs_deltas_by_the_population_and_averages_by_those_who_answered():
    samples = FedADMM(eta=2.0, weights="samples")
    run = Federation(samples, CLIENTS, X0, solver=Exact())
    done = run.outcome([0, 2])
    delta = {i: done.states[i].x_hat_i - X0 for i in (0, 2)}
    close(done.server.x_tilde, X0 + (5 * delta[0] + 2 * delta[2]) / 10, 1e-14)
    avg = Federation(FedAvg(), CLIENTS, X0).outcome([0, 2])
    close(avg.server.x_bar, (5 * avg.local_models[0] + 2 * avg.local_models[2]) / 7, 1e-14)


def test_answers_in_single_precision_are_summed_in_double():
    x0 = X0.float() / 3
    run = Federation(FedADMM(eta=3.0, weights="samples"), CLIENTS, x0).run([[0, 1, 2]])
    before, start = run.states(), run.server.x_tilde
    done = run.outcome([0, 1, 2])
    delta = [(done.states[i].x_hat_i - before[i].x_hat_i).double() for i in range(3)]
    close(done.server.x_tilde, start + (5 * delta[0] + 3 * delta[1] + 2 * delta[2]) / 10, 1e-15)


def test_clients_may_have_names():
    named = dict(zip(["ann", "bob", "cy"], CLIENTS, strict=True))
    run = Federation(ADMM, named, X0).run([["bob"], ["ann", "cy"]])
    same = Federation(ADMM, CLIENTS, X0).run([[1], [0, 2]])
    assert identical(run.server, same.server)
    assert set(run.store) == {"ann", "bob", "cy"}


def test_an_engine_that_loses_an_answer_is_found_out():
    class Lossy(BareEngine):
        def ask(self, step, states, down, cohort):
            yield from list(super().ask(step, states, down, cohort))[:-1]

    state, weights = ADMM.init_client(X0), dict.fromkeys(range(3), 1.0)
    engine = Lossy(dict(enumerate(CLIENTS)))
    with pytest.raises(ValueError, match="answered for 1 of 2 clients"):
        run_round(
            ADMM, ADMM.init_server(X0), [0, 1], engine, lambda i: state, weights, partial(ADMM.broadcast, work=WORK)
        )
