"""Laws that every algorithm obeys, over the one list `ALGORITHMS` of tests/helpers/problems.py."""

import io

import pytest
import torch
from helpers.problems import (
    ALGORITHMS,
    EACH,
    MEANS,
    WORK,
    Federation,
    allowed,
    close,
    cohorts_of,
    copy_of,
    every_algorithm,
    federations,
    fields_of,
    having,
    identical,
    name_of,
    quadratic,
    random_clients,
    shares,
    solver_for,
    variables_of,
)
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import simulate
from lightning_fed.algorithms import Compressed
from lightning_fed.core.memory import tensors_of, with_tensors
from lightning_fed.laboratory.quadratic import Oracle
from lightning_fed.prox import Box
from lightning_fed.transforms import Clip, Quantize, TopK

one_exchange = pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if a.traits.exchanges == 1], ids=name_of)


@every_algorithm
@given(federations())
@EACH
def test_steps_are_pure(algorithm, federation):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0).run(allowed(algorithm, cohorts, len(clients)))
    everybody = list(run.clients)
    inputs = (run.server, run.states(), x0, [(f.A, f.b) for f in clients])
    before = copy_of(inputs)
    first, second = run.outcome(everybody), run.outcome(everybody)
    assert identical(inputs, before)
    assert identical((first.server, first.states), (second.server, second.states))
    assert first.losses == second.losses


@every_algorithm
@given(federations(), st.randoms(use_true_random=False))
@EACH
def test_order_of_clients_in_a_cohort_does_not_matter(algorithm, federation, random):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0).run(allowed(algorithm, cohorts, len(clients)))
    order = list(run.clients)
    other = random.sample(order, len(order))
    forward, shuffled = run.outcome(order, exchanges=1), run.outcome(other, exchanges=1)
    assert identical([forward.states[i] for i in order], [shuffled.states[i] for i in order])
    close(run.outcome(order).server.x_bar, run.outcome(other).server.x_bar, 1e-13)


@every_algorithm
@given(federations(smallest=2), st.randoms(use_true_random=False))
@EACH
def test_permuting_client_ids_permutes_states_only(algorithm, federation, random):
    clients, x0, cohorts = federation
    new = list(range(len(clients)))
    random.shuffle(new)
    cohorts = allowed(algorithm, cohorts, len(clients))
    renamed = [[new[i] for i in cohort] for cohort in cohorts]
    moved = {new[i]: f for i, f in enumerate(clients)}
    here = Federation(algorithm, clients, x0).run(cohorts)
    there = Federation(algorithm, moved, x0).run(renamed)
    close(here.server.x_bar, there.server.x_bar, 1e-12)
    for i, state in here.states().items():
        for name, value in vars(state).items():
            close(value, vars(there.states()[new[i]])[name], 1e-12)


@every_algorithm
@given(federations())
@EACH
def test_clients_that_do_not_take_part_keep_their_state_bit_for_bit(algorithm, federation):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0)
    for cohort in allowed(algorithm, cohorts, len(clients)):
        before = copy_of(run.states())
        run.run([cohort])
        assert all(identical(run.store[i].state, before[i]) for i in run.clients if i not in cohort)


@every_algorithm
@given(federations())
@EACH
def test_an_empty_round_changes_nothing(algorithm, federation):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0).run(allowed(algorithm, cohorts, len(clients)))
    before = copy_of((run.server, run.states()))
    done = run.outcome([])
    run.run([[]])
    assert identical((run.server, run.states()), before)
    assert not done.states
    assert (done.bytes_down, done.bytes_up) == (0, 0)


@pytest.mark.parametrize(
    ("algorithm", "mean", "of"),
    [
        pytest.param(a, mean, of, id=f"{mean} of {name_of(a)}")
        for a in ALGORITHMS
        for mean, of in MEANS.items()
        if {mean, of} <= variables_of(a)
    ],
)
@given(federations(rounds=10))
@EACH
def test_server_memory_is_the_weighted_mean_of_the_clients(algorithm, mean, of, federation):
    clients, x0, cohorts = federation
    cohorts, w = allowed(algorithm, cohorts, len(clients)), shares(clients, getattr(algorithm, "weights", "uniform"))
    history = simulate(algorithm, clients, x0, cohorts=cohorts, solver=solver_for(algorithm))
    for server, states in zip(*both(history), strict=True):
        close(vars(server)[mean], sum(float(w[i]) * getattr(s, of) for i, s in enumerate(states)), 1e-12)


@pytest.mark.parametrize("transform", [TopK(1), Clip(0.3), Quantize(3)], ids=lambda t: type(t).__name__)
@pytest.mark.parametrize(
    ("algorithm", "mean", "of"),
    [
        pytest.param(a, mean, of, id=f"{mean} of {name_of(a)}")
        for a in ALGORITHMS
        for mean, of in MEANS.items()
        if {mean, of} <= variables_of(a)
    ],
)
@given(federations(rounds=10))
@EACH
def test_server_memory_is_the_mean_of_the_clients_whatever_happens_to_messages(
    algorithm, mean, of, transform, federation
):
    clients, x0, cohorts = federation
    cohorts, w = allowed(algorithm, cohorts, len(clients)), shares(clients, getattr(algorithm, "weights", "uniform"))
    changed = Compressed(algorithm, transform)
    history = simulate(changed, clients, x0, cohorts=cohorts, solver=solver_for(algorithm))
    for server, states in zip(*both(history), strict=True):
        counted = [getattr(s.inner, of) - (s.kept if algorithm.traits.sends_changes else 0) for s in states]
        expected = sum(float(w[i]) * share for i, share in enumerate(counted))
        close(vars(server)[mean], expected, 1e-12 * max(1.0, float(expected.abs().max())))


def both(history):
    return history.server, history.clients


@having("z_i", "x_hat_i")
@given(federations())
@EACH
def test_after_an_exact_solve_the_dual_is_minus_the_gradient(algorithm, federation):
    clients, x0, cohorts = federation
    last = simulate(algorithm, clients, x0, cohorts=cohorts).clients[-1]
    for i in set().union(*cohorts):
        close(last[i].z_i, -clients[i].grad(last[i].x_i), 1e-11)
        close(last[i].x_hat_i, last[i].x_i - clients[i].grad(last[i].x_i) / algorithm.traits.penalty, 1e-11)


@pytest.mark.parametrize(
    ("algorithm", "dual", "sign"),
    [
        pytest.param(a, dual, sign, id=name_of(a))
        for a in ALGORITHMS
        for dual, sign in (("lam_i", -1), ("q_i", 1))
        if dual in variables_of(a) and not a.traits.plain_sgd
    ],
)
@given(federations())
@EACH
def test_after_an_exact_solve_the_duals_of_fedpd_and_feddyn_are_gradients_too(algorithm, dual, sign, federation):
    clients, x0, cohorts = federation
    cohorts = allowed(algorithm, cohorts, len(clients))
    last = simulate(algorithm, clients, x0, cohorts=cohorts).clients[-1]
    for i in set().union(*cohorts):
        close(sign * vars(last[i])[dual], clients[i].grad(last[i].x_i), 1e-10)


@having("y_i")
@given(federations())
@EACH
def test_after_an_exact_solve_the_point_is_the_prox_of_its_centre(algorithm, federation):
    clients, x0, cohorts = federation
    cohorts = allowed(algorithm, cohorts, len(clients))
    last = simulate(algorithm, clients, x0, cohorts=cohorts).clients[-1]
    for i in set().union(*cohorts):
        close(algorithm.traits.penalty * (last[i].y_i - last[i].x_i), clients[i].grad(last[i].x_i), 1e-11)


@one_exchange
@given(federations(), st.data())
@EACH
def test_another_clients_loss_never_changes_my_state_in_the_same_round(algorithm, federation, data):
    clients, x0, cohorts = federation
    n = len(clients)
    (cohort,) = allowed(algorithm, [data.draw(st.sets(st.integers(0, n - 1), min_size=1).map(sorted))], n)
    j = data.draw(st.sampled_from(cohort))
    run = Federation(algorithm, clients, x0).run(allowed(algorithm, cohorts, len(clients)))
    before = run.outcome(cohort)
    changed = quadratic(2 * clients[j].A.numpy(), 1 - clients[j].b.numpy(), clients[j].num_examples)
    run.engine.oracles[j] = Oracle(changed, run.engine.oracles[j].solver)
    after = run.outcome(cohort)
    assert all(identical(before.states[i], after.states[i]) for i in cohort if i != j)
    at_the_border = isinstance(algorithm.g, Box) and algorithm.traits.plain_sgd  # of the box, both times
    assert at_the_border or not torch.equal(before.local_models[j], after.local_models[j])


@every_algorithm
@given(federations(), st.data())
@EACH
def test_my_new_state_depends_on_my_state_my_loss_and_the_broadcast_alone(algorithm, federation, data):
    clients, x0, cohorts = federation
    n = len(clients)
    run = Federation(algorithm, clients, x0).run(allowed(algorithm, cohorts, len(clients)))
    (cohort,) = allowed(algorithm, [data.draw(st.sets(st.integers(0, n - 1), min_size=1).map(sorted))], n)
    done = run.outcome(cohort, exchanges=1)
    down = copy_of(algorithm.broadcast(run.server, WORK))
    for i in cohort:
        alone = algorithm.client_step(copy_of(run.store[i].state), down, run.engine.oracles[i])
        assert identical(alone.state, done.states[i])
        assert identical(alone.state, run.outcome([i], exchanges=1).states[i])
        assert torch.equal(alone.x_i, done.local_models[i])


@every_algorithm
def test_the_remembered_local_model_is_the_one_just_found(algorithm):
    clients, x0 = random_clients(2, n=3, d=2)
    done = Federation(algorithm, clients, x0).outcome([0, 1, 2] if algorithm.traits.everybody else [0, 2])
    for i, state in done.states.items():
        remembered = algorithm.local_model(state)
        assert remembered is None or torch.equal(remembered, done.local_models[i])
        assert (remembered is None) == ("x_i" not in fields_of(state))


boxed = pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if isinstance(a.g, Box)], ids=name_of)


@boxed
@given(federations())
@EACH
def test_models_are_feasible_from_the_first_answer_on(algorithm, federation):
    clients, x0, cohorts = federation
    cohorts = allowed(algorithm, cohorts, len(clients))
    history = simulate(algorithm, clients, 3 * x0, cohorts=cohorts, solver=solver_for(algorithm))
    first = next((k for k, cohort in enumerate(cohorts) if cohort), len(cohorts))
    for server in history.server[first + 1 :]:
        assert algorithm.g(server.x_bar) == 0
    if getattr(algorithm, "project_initial", False):
        assert algorithm.g(history.server[0].x_bar) == 0


@boxed
def test_models_stay_feasible_in_single_precision(algorithm):
    clients, x0 = random_clients(8, n=3, d=4)
    for server in simulate(algorithm, clients, 3 * x0.float(), rounds=5, solver=solver_for(algorithm)).server[1:]:
        assert server.x_bar.dtype == torch.float32
        assert algorithm.g(server.x_bar) == 0


@every_algorithm
@given(federations(), st.data())
@EACH
def test_a_run_continues_identically_after_save_and_restore(algorithm, federation, data):
    clients, x0, cohorts = federation
    rest = allowed(algorithm, data.draw(cohorts_of(len(clients))), len(clients))
    whole = Federation(algorithm, clients, x0).run(allowed(algorithm, cohorts, len(clients)))
    saved = {"server": tensors_of(whole.server), "clients": whole.store.state_dict()}
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    again = Federation(algorithm, clients, x0)
    again.server = with_tensors(again.server, loaded["server"])
    again.store.load_state_dict(loaded["clients"])
    whole.run(rest)
    again.run(rest)
    assert identical((whole.server, whole.states()), (again.server, again.states()))
    assert [whole.store[i].visits for i in whole.clients] == [again.store[i].visits for i in again.clients]
