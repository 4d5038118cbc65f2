"""Limits on dual and server steps under sampling: tables, closed forms, weights of cohorts, verdicts."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.problems import LAW
from helpers.sampling_references import blocks, coins, doubly, nonempty, replaced, systematic, uniform
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.traits import DualSteps
from lightning_fed.sampling import (
    Available,
    Bernoulli,
    Blocks,
    DoublyUniform,
    Full,
    NonemptyBernoulli,
    Systematic,
    Uniform,
    WithReplacement,
)
from lightning_fed.theory import cohort_weight as module
from lightning_fed.theory.cohort_weight import cohort_weight
from lightning_fed.theory.stability import client_limits, equal_weights_limit, g_star, stability_of

HEAVY = np.array([0.25] + 29 * [0.75 / 29])
W = [3.0, 1.0, 2.0, 0.5]
P = [0.9, 0.2, 0.5, 1.0]
LINE = DualSteps(gain=1.0, rate=1.0, solved=True)  # FedDyn, and FedADMM whose server averages over the active clients


# -- the table and the formula -------------------------------------------------------------------------------------


def test_the_limits_of_thirty_clients_of_which_one_has_a_quarter():
    found = [float(client_limits(HEAVY, Uniform(size)).min()) for size in (1, 2, 3, 5, 10)]
    assert np.round(found, 3).tolist() == [0.136, 0.274, 0.412, 0.683, 1.359]


@pytest.mark.parametrize(
    ("size", "n", "printed"),
    [(1, 2, 1.33), (1, 10, 1.053), (2, 10, 1.765), (5, 10, 3.27), (1, 30, 1.017), (3, 30, 1.818), (10, 30, 2.78)],
)
def test_equal_weights_have_a_closed_form(size, n, printed):
    assert equal_weights_limit(size, n) == pytest.approx(printed, abs=5e-3)
    assert np.allclose(client_limits(np.ones(n), Uniform(size)), equal_weights_limit(size, n), rtol=1e-12)


@LAW
@given(p=st.floats(0.001, 1.0), low=st.floats(0.01, 1.0), high=st.floats(0.01, 1.0), at=st.floats(0, 1))
def test_g_star_is_least_at_an_end_of_an_interval_and_grows_with_the_probability(p, low, high, at):
    inside = low + at * (high - low)
    assert g_star(p, inside) >= min(g_star(p, low), g_star(p, high)) * (1 - 1e-12)
    assert g_star(p, inside) >= g_star(p / 2, inside)


# -- the weight of a cohort --------------------------------------------------------------------------------------------

EXACT = {
    "full": (Full(), uniform(4)),
    "uniform": (Uniform(2), uniform(2)),
    "doubly": (DoublyUniform([0.1, 0.2, 0.3, 0.0, 0.4]), doubly([0.1, 0.2, 0.3, 0.0, 0.4])),
    "coins": (Bernoulli(P), coins(P)),
    "nonempty": (NonemptyBernoulli([*P[:3], 0.3]), nonempty([*P[:3], 0.3])),
    "blocks": (Blocks([[0, 2], [1], [3]]), blocks([(0, 2), (1,), (3,)])),
    "replacement": (WithReplacement(3, [1, 2, 3, 4]), replaced(3, [1, 2, 3, 4])),
    "available coins": (Available(Bernoulli(0.5), chance=P), coins([0.5 * p for p in P])),
}


def enumerated(law, w):
    """E[W | i in S] of every client, by its definition."""
    total, seen = np.zeros(len(w)), np.zeros(len(w))
    for cohort, p in law(tuple(range(len(w)))).items():
        total[list(cohort)] += p * w[list(cohort)].sum()
        seen[list(cohort)] += p
    return total / seen


@pytest.mark.parametrize("name", EXACT)
def test_the_weight_of_a_client_s_cohorts_is_exact(name):
    sampler, law = EXACT[name]
    w = np.array(W) / np.sum(W)
    low, high = cohort_weight(sampler, W)
    assert np.allclose(low, enumerated(law, w), rtol=1e-12)
    assert np.array_equal(low, high)


@pytest.mark.parametrize("size", [1, 2, 3, 4])
def test_the_weight_is_bounded_where_pairs_are_not_known(size, monkeypatch):
    monkeypatch.setattr(module, "PAIRS", 0)
    w = np.array(W) / np.sum(W)
    cases = [
        (Systematic(size, [1, 2, 3, 6]), systematic(size, [1, 2, 3, 6])),
        (WithReplacement(size, [1, 2, 3, 6]), replaced(size, [1, 2, 3, 6])),
        (Available(Uniform(size), chance=1.0), uniform(size)),
    ]
    for sampler, law in cases:
        low, high = cohort_weight(sampler, W)
        truth = enumerated(law, w)
        assert (low <= truth + 1e-12).all()
        assert (truth <= high + 1e-12).all()
        if size == 1:
            assert np.allclose(low, w)
            assert np.allclose(high, w)


def test_bounds_stay_on_the_safe_side():
    exact = client_limits(W, WithReplacement(2, [1, 2, 3, 4]))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "PAIRS", 0)
        assert (client_limits(W, WithReplacement(2, [1, 2, 3, 4])) <= exact + 1e-12).all()


# -- the verdict ----------------------------------------------------------------------------------------------------


def test_a_run_outside_the_safe_rule_is_told_which_client_decides_and_what_would_do():
    found = stability_of(DualSteps(gain=0.3, rate=0.1), HEAVY[::-1], Uniform(1))
    assert not found.safe
    assert (found.client, found.weight, found.probability) == (29, pytest.approx(0.25), pytest.approx(1 / 30))
    assert found.limit == pytest.approx(0.136, abs=5e-4)
    assert found.largest_ab == pytest.approx(0.068, abs=5e-4)
    assert found.largest_b == pytest.approx(0.68, abs=5e-3)
    assert found.theorem is None
    for b in (found.largest_b, 0.999 * found.largest_b):
        assert stability_of(DualSteps(gain=0.1 * b, rate=0.1), HEAVY[::-1], Uniform(1)).safe
    assert stability_of(DualSteps(0.99 * found.by_weight, 0.1), HEAVY, Systematic(1, HEAVY.tolist())).safe
    assert stability_of(DualSteps(0.99 * found.uniform, 0.1), np.ones(30), Uniform(1)).safe


@pytest.mark.parametrize(
    ("size", "b", "safe"), [(10, 3, True), (10, 5, True), (3, 1, True), (3, 5, False), (1, 3, False)]
)
def test_the_safe_rule_for_a_quarter_in_one_client(size, b, safe):
    assert stability_of(DualSteps(gain=0.1 * b, rate=0.1), HEAVY, Uniform(size)).safe is safe


@pytest.mark.parametrize("sampler", [Uniform(1), Uniform(10), Blocks(10), Full()], ids=str)
def test_equal_weights_with_solved_local_problems_are_covered_by_a_theorem(sampler):
    found = stability_of(LINE, np.ones(30), sampler)
    assert found.safe
    assert found.theorem == ("A" if sampler == Full() else "B")


@pytest.mark.parametrize("law", [Bernoulli(0.1), NonemptyBernoulli(0.1), Available(Uniform(2), chance=0.5)], ids=str)
def test_cohorts_of_random_size_are_covered_at_b_1(law):
    assert stability_of(LINE, np.ones(30), law).theorem == "B"
    assert stability_of(DualSteps(0.5, 0.5, solved=True), np.ones(30), law).theorem == "B"
    assert stability_of(DualSteps(0.51, 0.5, solved=True), np.ones(30), law).theorem is None
    assert stability_of(LINE, HEAVY, law).theorem is None


def test_no_theorem_covers_unequal_weights():
    assert not stability_of(LINE, HEAVY, Uniform(10)).safe
    assert stability_of(LINE, HEAVY, Full()).theorem == "A"
    assert stability_of(LINE, HEAVY, Systematic(1, HEAVY.tolist())).theorem == "B"
    assert stability_of(LINE, np.ones(30), Bernoulli([0.1] * 29 + [0.2])).theorem is None
    assert stability_of(LINE, np.ones(30), Blocks(7)).theorem is None
    beyond = DualSteps(gain=1.5, rate=0.5, solved=True)  # b = 3
    assert stability_of(beyond, np.ones(30), Uniform(1)).theorem is None


def test_steps_that_fail_with_everybody_are_not_safe():
    assert stability_of(DualSteps(1.7, rate=0.1), np.ones(4), Full()).theorem == "A"
    assert not stability_of(DualSteps(1.9, rate=0.1), np.ones(4), Full()).safe
    assert not stability_of(DualSteps(1.0, rate=1.0), np.ones(4), Full()).safe
    assert stability_of(DualSteps(1.9), np.ones(4), Full()).safe
    assert stability_of(DualSteps(1.9), np.ones(4), Full()).largest_b is None


@pytest.mark.parametrize("weights", [[], [1.0, 0.0], [1.0, float("nan")], [[1.0]]], ids=str)
def test_weights_are_positive(weights):
    with pytest.raises(ValueError, match="weights must be a list of positive finite numbers"):
        stability_of(LINE, weights, Full())


def test_arguments_out_of_range_are_refused():
    with pytest.raises(ValueError, match=r"p must be a number in \(0, 1\], got 0"):
        g_star(0, 0.5)
    with pytest.raises(ValueError, match=r"c must be a number in \(0, 1\], got 1.5"):
        g_star(0.5, 1.5)
    with pytest.raises(ValueError, match="size must lie in 1 to n = 3, got 4"):
        equal_weights_limit(4, 3)
