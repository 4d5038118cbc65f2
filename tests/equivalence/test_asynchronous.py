"""Uploads that come late: FedADMM and FedDR stay the same method, and without delays the synchronous one."""

import heapq

import numpy as np
import pytest
from helpers import references
from helpers.problems import LAW, close, federations, golden, gradient, identical, in_numpy, random_clients
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import Exact, GradientDescent, simulate
from lightning_fed.algorithms import FedADMM, FedDR, FedDRII, FedPD
from lightning_fed.prox import L1, Box, Zero
from lightning_fed.sampling import Full

ETA = 5.0  # above the largest curvature of `random_clients`, which is 4
regularisers = st.sampled_from([Zero(), L1(0.2), Box(-0.3, 0.4)])
solvers = st.sampled_from([Exact(), GradientDescent(3, 0.05)])


def column(history, name):
    return np.array([[getattr(state, name).numpy() for state in states] for states in history.clients])


def models(history):
    return np.array([server.x_bar.numpy() for server in history.server])


def delays_of(data, n, events=12):
    """Any uploads, each of a job that began after the client's last upload."""
    chosen, last = [], {}
    for k in range(events):
        i = data.draw(st.integers(0, n - 1))
        chosen.append((i, data.draw(st.integers(0, k - last.get(i, 0)))))
        last[i] = k + 1
    return chosen


@given(federations(), regularisers, st.sampled_from([0.5, 0.9, 1.0, 1.5]), solvers, st.data())
@LAW
def test_asynchronous_fedadmm_is_asynchronous_feddr_for_any_delays(federation, g, alpha, solver, data):
    clients, x0, _ = federation
    events = delays_of(data, len(clients))
    admm = simulate(FedADMM(eta=ETA, alpha=alpha, g=g), clients, x0, events=events, solver=solver)
    dr = simulate(FedDR(eta_hat=1 / ETA, alpha=alpha, g=g), clients, x0, events=events, solver=solver)
    close(models(admm), models(dr))
    close(column(admm, "x_hat_i"), column(dr, "x_hat_i"))
    close([s.x_tilde.numpy() for s in admm.server], column(admm, "x_hat_i").mean(1), 1e-12)
    assert admm.cohorts == [[i] for i, _ in events]


@pytest.mark.parametrize("kind", [FedADMM, FedDR])
@given(federations(), regularisers, st.data())
@LAW
def test_without_delays_an_asynchronous_run_is_a_run_of_singletons(kind, federation, g, data):
    clients, x0, _ = federation
    who = data.draw(st.lists(st.integers(0, len(clients) - 1), min_size=1, max_size=12))
    how = {"x0": x0, "solver": GradientDescent(3, 0.05)}
    late = simulate(kind(1.0, 0.9, g), clients, events=[(i, 0) for i in who], **how)
    prompt = simulate(kind(1.0, 0.9, g), clients, cohorts=[[i] for i in who], **how)
    assert identical((late.server, late.clients), (prompt.server, prompt.clients))


@given(federations(), regularisers, st.sampled_from([0.5, 0.9]), st.data())
@LAW
def test_asynchronous_feddr_is_its_definition(federation, g, alpha, data):
    clients, x0, _ = federation
    events = delays_of(data, len(clients))
    ours = simulate(FedDR(eta_hat=1 / ETA, alpha=alpha, g=g), clients, x0, events=events)
    prox = {Zero: references.zero, L1: references.soft(0.2), Box: references.clip(-0.3, 0.4)}[type(g)]
    close(models(ours), [r.x_bar for r in references.async_feddr(in_numpy(clients), x0, events, 1 / ETA, alpha, prox)])


def test_late_uploads_reach_a_stationary_point():
    clients, x0 = random_clients(4, n=4, d=3)
    events = [(k % 4, min(k, 3)) for k in range(1200)]  # all four at work all the time
    end = simulate(FedADMM(eta=9.0, alpha=0.9), clients, x0, events=events).x_bar
    close(gradient(clients, end), np.zeros(3), 1e-9)


def always_on(durations, number):
    """Uploads of clients that start again at once, with the model just published; ties go to who started first."""
    jobs, started, events = [], len(durations), []
    for i, duration in enumerate(durations):
        heapq.heappush(jobs, (duration, i, i, 0))
    for k in range(number):
        now, _, i, read = heapq.heappop(jobs)
        events.append((i, k - read))
        heapq.heappush(jobs, (now + durations[i], started, i, k + 1))
        started += 1
    return events


def test_clients_that_are_always_on_give_the_events_of_the_fixture_and_converge():
    durations = (1, 1.5, 2, 3, 5, 8)
    events = always_on(durations, 3000)
    twelve = [(0, 0), (1, 1), (2, 2), (0, 2), (3, 4), (1, 3), (0, 2), (2, 4), (0, 1), (1, 3), (4, 10), (0, 2)]
    assert events[:12] == twelve
    assert max(delay for _, delay in events) == 23
    clients, x0 = random_clients(5, n=6, d=3)
    admm, dr = (simulate(a, clients, x0, events=events) for a in (FedADMM(9.0, 0.9), FedDR(1 / 9, 0.9)))
    close(models(admm), models(dr))
    close([s.x_tilde.numpy() for s in dr.server], column(dr, "x_hat_i").mean(1), 1e-11)
    close(gradient(clients, dr.x_bar), np.zeros(3), 1e-9)


@pytest.mark.parametrize(
    ("events", "about"),
    [
        ([(0, 1)], r"events\[0\] has delay 1; before it there were 0 uploads"),
        ([(0, 0), (1, -1)], r"events\[1\] has delay -1"),
        ([(0, 0), (1, 0.5)], r"events\[1\] has delay 0.5"),
        ([(0, 0), (3, 0)], "names client 3; clients are 0 to 2"),
        ([(0, 0), (0, 1)], r"events\[1\] of client 0 has delay 1.*one job at a time\. Its delay can be 0 to 0\."),
        ([(0, 0), (1, 1), (2, 0), (0, 3)], r"events\[3\] of client 0 .*last upload \(3 before it\).*can be 0 to 2\."),
    ],
    ids=str,
)
def test_an_event_that_cannot_have_happened_is_refused(events, about):
    clients, x0 = golden()
    with pytest.raises(ValueError, match=about):
        simulate(FedADMM(), clients, x0, events=events)


@pytest.mark.parametrize(
    ("algorithm", "about"),
    [
        (FedPD(), "FedPD needs every client in every round"),
        (FedDRII(mode="upload_first"), "FedDRII visits clients 2 times"),
    ],
    ids=["everybody", "two exchanges"],
)
def test_algorithms_that_make_no_sense_with_late_uploads_are_refused(algorithm, about):
    clients, x0 = golden()
    with pytest.raises(ValueError, match=about):
        simulate(algorithm, clients, x0, events=[(0, 0)])


def test_events_leave_nothing_for_rounds_cohorts_and_a_sampler_to_decide():
    clients, x0 = golden()
    for more in ({"rounds": 1}, {"cohorts": [[0]]}):
        with pytest.raises(ValueError, match="one of rounds=, cohorts= and events="):
            simulate(FedADMM(), clients, x0, events=[(0, 0)], **more)
    with pytest.raises(ValueError, match="events= and sampler="):
        simulate(FedADMM(), clients, x0, events=[(0, 0)], sampler=Full())


def test_no_events_leave_the_start():
    clients, x0 = golden()
    assert len(simulate(FedADMM(), clients, x0, events=[])) == 0
