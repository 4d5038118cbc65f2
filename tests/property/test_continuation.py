"""A run that goes on from an earlier one is the run that was never stopped, bit for bit."""

import pytest
from helpers.problems import ALGORITHMS, EACH, allowed, cohorts_of, federations, golden, identical, name_of
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed import GradientDescent, simulate
from lightning_fed.algorithms import Compressed, FedADMM, FedAvg, FedDR, FedPAQ, FedProx
from lightning_fed.laboratory import History
from lightning_fed.sampling import Uniform
from lightning_fed.transforms import Quantize

RANDOM = [FedPAQ(levels=3), FedProx(mu=0.5, stragglers=0.5), Compressed(FedADMM(eta=6.0), Quantize(4))]


@pytest.mark.parametrize("algorithm", [*ALGORITHMS, *RANDOM], ids=name_of)
@given(federations(), st.data())
@EACH
def test_some_rounds_and_then_more_are_all_of_them_at_once(algorithm, federation, data):
    clients, x0, first = federation
    then = data.draw(cohorts_of(len(clients)))
    first, then = (allowed(algorithm, cohorts, len(clients)) for cohorts in (first, then))
    how = {"solver": GradientDescent(3, 0.05), "seed": 5}
    whole = simulate(algorithm, clients, x0, cohorts=[*first, *then], **how)
    half = simulate(algorithm, clients, x0, cohorts=first, **how)
    before = (list(half.server), list(half.clients), list(half.cohorts))
    both = simulate(algorithm, clients, cohorts=then, resume=half, **how)
    assert identical((both.server, both.clients), (whole.server, whole.clients))
    assert both.cohorts == whole.cohorts
    assert before == (half.server, half.clients, half.cohorts)


def test_cohorts_are_drawn_on_from_where_the_run_stopped():
    clients, x0 = golden()
    how = {"sampler": Uniform(1), "seed": 3}
    whole = simulate(FedADMM(), clients, x0, rounds=12, **how)
    half = simulate(FedADMM(), clients, x0, rounds=5, **how)
    both = simulate(FedADMM(), clients, rounds=7, resume=half, **how)
    assert both.cohorts == whole.cohorts
    assert identical(both.server, whole.server)
    assert identical(simulate(FedADMM(), clients, rounds=0, resume=half, **how).server, half.server)


def test_late_uploads_may_have_read_a_model_of_the_earlier_run():
    clients, x0 = golden()
    events = [(0, 0), (1, 1), (2, 2), (0, 2), (1, 2), (2, 2)]
    whole = simulate(FedDR(alpha=0.8), clients, x0, events=events)
    half = simulate(FedDR(alpha=0.8), clients, x0, events=events[:2])
    both = simulate(FedDR(alpha=0.8), clients, events=events[2:], resume=half)
    assert identical((both.server, both.clients), (whole.server, whole.clients))
    with pytest.raises(ValueError, match=r"events\[0\] of client 0 has delay 2.*can be 0 to 1\."):
        simulate(FedDR(alpha=0.8), clients, events=[(0, 2)], resume=half)


def test_a_run_of_something_else_is_refused():
    clients, x0 = golden()
    half = simulate(FedADMM(), clients, x0, rounds=2)
    with pytest.raises(ValueError, match="got x0= and resume="):
        simulate(FedADMM(), clients, x0, rounds=1, resume=half)
    with pytest.raises(ValueError, match="got 2 clients, but resume= is a run of 3"):
        simulate(FedADMM(), clients[:2], rounds=1, resume=half)
    with pytest.raises(ValueError, match="got 3 clients, but resume= is a run of 0"):
        simulate(FedADMM(), clients, rounds=1, resume=History())
    with pytest.raises(ValueError, match=r"FedAvg cannot resume from a history that holds .*fedadmm_paper states"):
        simulate(FedAvg(), clients, rounds=1, resume=half)
