"""Laws that every algorithm obeys, over the one list `ALGORITHMS` of tests/problems.py."""

import dataclasses
import io

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from problems import (
    ALGORITHMS,
    LAW,
    Federation,
    close,
    cohorts_of,
    copy_of,
    federations,
    identical,
    name_of,
    quadratic,
    random_clients,
    seeds,
    shares,
)

from lightning_fed import GradientDescent, simulate
from lightning_fed.core import Broadcast, Solution
from lightning_fed.local.quadratic import Oracle
from lightning_fed.prox import Box
from lightning_fed.store import tensors_of, with_tensors

every_algorithm = pytest.mark.parametrize("algorithm", ALGORITHMS, ids=name_of)
X0 = torch.zeros(2, dtype=torch.float64)


def fields_of(record):
    return {field.name for field in dataclasses.fields(record)}


def having(*names):
    """Algorithms whose client or server states have these fields."""
    have = [a for a in ALGORITHMS if set(names) <= fields_of(a.init_client(X0)) | fields_of(a.init_server(X0))]
    assert have
    return pytest.mark.parametrize("algorithm", have, ids=name_of)


@every_algorithm
@given(federations())
@LAW
def test_steps_are_pure(algorithm, federation):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0).run(cohorts)
    everybody = list(run.clients)
    inputs = (run.server, run.states(), x0, [(f.A, f.b) for f in clients])
    before = copy_of(inputs)
    first, second = run.outcome(everybody), run.outcome(everybody)
    assert identical(inputs, before)
    assert identical((first.server, first.states), (second.server, second.states))
    assert first.losses == second.losses


@every_algorithm
@given(federations(), st.randoms(use_true_random=False))
@LAW
def test_order_of_clients_in_a_cohort_does_not_matter(algorithm, federation, random):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0).run(cohorts)
    order = list(run.clients)
    forward = run.outcome(order)
    random.shuffle(order)
    shuffled = run.outcome(order)
    assert identical(
        [forward.states[i] for i in range(len(clients))], [shuffled.states[i] for i in range(len(clients))]
    )
    close(forward.server.x_bar, shuffled.server.x_bar, 1e-13)


@every_algorithm
@given(federations(smallest=2), st.randoms(use_true_random=False))
@LAW
def test_permuting_client_ids_permutes_states_only(algorithm, federation, random):
    clients, x0, cohorts = federation
    new = list(range(len(clients)))
    random.shuffle(new)
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
@LAW
def test_clients_that_do_not_take_part_keep_their_state_bit_for_bit(algorithm, federation):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0)
    for cohort in cohorts:
        before = copy_of(run.states())
        run.run([cohort])
        assert all(identical(run.store[i].state, before[i]) for i in run.clients if i not in cohort)


@every_algorithm
@given(federations())
@LAW
def test_an_empty_round_changes_nothing(algorithm, federation):
    clients, x0, cohorts = federation
    run = Federation(algorithm, clients, x0).run(cohorts)
    before = copy_of((run.server, run.states()))
    done = run.outcome([])
    run.run([[]])
    assert identical((run.server, run.states()), before)
    assert not done.states
    assert (done.bytes_down, done.bytes_up) == (0, 0)


@having("x_tilde", "x_hat_i")
@given(federations(rounds=10))
@LAW
def test_server_memory_is_the_weighted_mean_of_the_clients(algorithm, federation):
    clients, x0, cohorts = federation
    w = shares(clients, algorithm.weights)
    for server, states in zip(*both(simulate(algorithm, clients, x0, cohorts=cohorts)), strict=True):
        close(server.x_tilde, sum(float(w[i]) * s.x_hat_i for i, s in enumerate(states)), 1e-12)


def both(history):
    return history.server, history.clients


@having("z_i")
@given(federations())
@LAW
def test_after_an_exact_solve_the_dual_is_minus_the_gradient(algorithm, federation):
    clients, x0, cohorts = federation
    last = simulate(algorithm, clients, x0, cohorts=cohorts).clients[-1]
    for i in set().union(*cohorts):
        close(last[i].z_i, -clients[i].grad(last[i].x_i), 1e-11)
        close(last[i].x_hat_i, last[i].x_i - clients[i].grad(last[i].x_i) / algorithm.penalty, 1e-11)


@having("y_i")
@given(federations())
@LAW
def test_after_an_exact_solve_the_point_is_the_prox_of_its_centre(algorithm, federation):
    clients, x0, cohorts = federation
    last = simulate(algorithm, clients, x0, cohorts=cohorts).clients[-1]
    for i in set().union(*cohorts):
        close(algorithm.penalty * (last[i].y_i - last[i].x_i), clients[i].grad(last[i].x_i), 1e-11)


@every_algorithm
@given(federations(), st.data())
@LAW
def test_another_clients_loss_never_changes_my_state_in_the_same_round(algorithm, federation, data):
    clients, x0, cohorts = federation
    n = len(clients)
    cohort = data.draw(st.sets(st.integers(0, n - 1), min_size=1).map(sorted))
    j = data.draw(st.sampled_from(cohort))
    run = Federation(algorithm, clients, x0).run(cohorts)
    before = run.outcome(cohort)
    changed = quadratic(2 * clients[j].A.numpy(), 1 - clients[j].b.numpy(), clients[j].num_examples)
    run.engine.oracles[j] = Oracle(changed, run.engine.oracles[j].solver)
    after = run.outcome(cohort)
    assert all(identical(before.states[i], after.states[i]) for i in cohort if i != j)
    assert not torch.equal(before.local_models[j], after.local_models[j])


@every_algorithm
@given(federations(), st.data())
@LAW
def test_my_new_state_depends_on_my_state_my_loss_and_the_broadcast_alone(algorithm, federation, data):
    clients, x0, cohorts = federation
    n = len(clients)
    run = Federation(algorithm, clients, x0).run(cohorts)
    cohort = data.draw(st.sets(st.integers(0, n - 1), min_size=1).map(sorted))
    done = run.outcome(cohort)
    down = Broadcast(run.server.x_bar.clone())
    for i in cohort:
        alone = algorithm.client_step(copy_of(run.store[i].state), down, run.engine.oracles[i])
        assert identical(alone.state, done.states[i])
        assert identical(alone.state, run.outcome([i]).states[i])
        assert torch.equal(alone.x_i, done.local_models[i])


@every_algorithm
def test_the_remembered_local_model_is_the_one_just_found(algorithm):
    clients, x0 = random_clients(2, n=3, d=2)
    done = Federation(algorithm, clients, x0).outcome([0, 2])
    for i, state in done.states.items():
        remembered = algorithm.local_model(state)
        assert remembered is None or torch.equal(remembered, done.local_models[i])
        assert (remembered is None) == ("x_i" not in fields_of(state))


boxed = pytest.mark.parametrize("algorithm", [a for a in ALGORITHMS if isinstance(a.g, Box)], ids=name_of)


@boxed
@given(federations())
@LAW
def test_models_are_feasible_from_the_first_answer_on(algorithm, federation):
    clients, x0, cohorts = federation
    history = simulate(algorithm, clients, 3 * x0, cohorts=cohorts)
    first = next((k for k, cohort in enumerate(cohorts) if cohort), len(cohorts))
    for server in history.server[first + 1 :]:
        assert algorithm.g(server.x_bar) == 0
    if getattr(algorithm, "project_initial", False):
        assert algorithm.g(history.server[0].x_bar) == 0


@boxed
def test_models_stay_feasible_in_single_precision(algorithm):
    clients, x0 = random_clients(8, n=3, d=4)
    for server in simulate(algorithm, clients, 3 * x0.float(), rounds=5).server[1:]:
        assert server.x_bar.dtype == torch.float32
        assert algorithm.g(server.x_bar) == 0


@every_algorithm
@given(federations(), st.data())
@LAW
def test_a_run_continues_identically_after_save_and_restore(algorithm, federation, data):
    clients, x0, cohorts = federation
    rest = data.draw(cohorts_of(len(clients)))
    whole = Federation(algorithm, clients, x0).run(cohorts)
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


class Diagonal:
    """One gradient step on losses a/2 x^2 - b x; ``a`` and ``b`` are of one client (d,) or of a stack (m, d)."""

    def __init__(self, a, b):
        self.a, self.b = a, b

    def solve(self, start, *, linear=None, rho=0.0, center=None):
        pull = rho * (start - center) if center is not None else 0.0
        slope = self.a * start - self.b + (0.0 if linear is None else linear) + pull
        return Solution(start - 0.05 * slope)


def stack(states):
    return type(states[0])(**{name: torch.stack([vars(s)[name] for s in states]) for name in vars(states[0])})


@every_algorithm
@given(seeds, st.integers(1, 4))
@LAW
def test_stacked_clients_take_the_same_step_as_single_ones(algorithm, seed, m):
    rng = torch.Generator().manual_seed(seed)
    x0, *models = torch.randn(3, 3, generator=rng, dtype=torch.float64)
    a, b = torch.rand(2, m, 3, generator=rng, dtype=torch.float64)
    states = [algorithm.init_client(x0) for _ in range(m)]
    for x_bar in models:
        single = [algorithm.client_step(s, Broadcast(x_bar), Diagonal(a[i], b[i])) for i, s in enumerate(states)]
        together = algorithm.client_step(stack(states), Broadcast(x_bar), Diagonal(a, b))
        states = [reply.state for reply in single]
        assert identical(together.state, stack(states))
        assert identical(together.message, stack([reply.message for reply in single]))


@every_algorithm
def test_steps_run_under_vmap(algorithm):
    x0, x_bar = torch.randn(2, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    a, b = torch.rand(2, 4, 3, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def step(state, a, b):
        reply = algorithm.client_step(state, Broadcast(x_bar), Diagonal(a, b))
        return reply.state, reply.message

    states = stack([algorithm.init_client(x0)] * 4)
    state, message = torch.vmap(step)(states, a, b)
    together = algorithm.client_step(states, Broadcast(x_bar), Diagonal(a, b))
    close(message.delta_i, together.message.delta_i, 1e-13)
    for name, value in vars(state).items():
        close(value, vars(together.state)[name], 1e-13)


@every_algorithm
def test_single_precision_models_come_from_double_precision_sums(algorithm):
    clients, x0 = random_clients(3, n=4, d=3, convex=True)
    ours = simulate(algorithm, clients, x0.float(), rounds=4, solver=GradientDescent(3, 0.05))
    exact = simulate(algorithm, clients, x0, rounds=4, solver=GradientDescent(3, 0.05))
    for server, states in zip(*both(ours), strict=True):
        assert server.x_bar.dtype == torch.float32
        assert {name: v.dtype for name, v in vars(server).items() if name != "x_bar"} in (
            {},
            {"x_tilde": torch.float64},
        )
        assert all(v.dtype == torch.float32 for state in states for v in vars(state).values())
    close(ours.x_bar, exact.x_bar, 1e-5)


@having("x_tilde", "x_hat_i")
def test_server_memory_does_not_drift_in_single_precision(algorithm):
    clients, x0 = random_clients(3, n=4, d=3, convex=True)
    run, w = Federation(algorithm, clients, x0.float()), shares(clients, algorithm.weights)
    for k in range(40):
        old, counted, cohort = run.states(), run.server.x_tilde, [k % 4, (k + 1) % 4]
        run.run([cohort])
        deltas = [float(w[i]) * (run.store[i].state.x_hat_i - old[i].x_hat_i).double() for i in cohort]
        close(run.server.x_tilde, counted + sum(deltas), 1e-14)
    close(run.server.x_tilde, sum(float(w[i]) * s.x_hat_i.double() for i, s in run.states().items()), 1e-6)
