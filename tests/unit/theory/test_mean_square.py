"""Exact second moments of small federations: where the limits on ab are reached, and Theorem A."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.mean_square import descent, flow, mean_radius, mean_square_radius, proximal, radius
from helpers.problems import LAW
from helpers.sampling_references import uniform
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.sampling import Uniform
from lightning_fed.theory.stability import client_limits, equal_weights_limit, g_star

HEAVY = np.array([0.25] + 29 * [0.75 / 29])


def law_of(law, n):
    return law(tuple(range(n)))


@LAW
@given(p=st.floats(0.01, 0.99), c=st.floats(0.01, 1.0))
def test_the_second_moment_of_a_stiff_client_among_flat_ones_has_eigenvalue_1_at_g_star(p, c):
    g = g_star(p, c)
    missed, drawn = np.array([[1, 1], [0, 1]]), np.array([[1 - c - g, 1], [-g, 1]])
    moments = (1 - p) * np.kron(missed, missed) + p * np.kron(drawn, drawn)
    assert abs(np.linalg.det(moments - np.eye(4))) < 1e-9
    for factor, grows in ((0.999, False), (1.001, True)):
        drawn = np.array([[1 - c - factor * g, 1], [-factor * g, 1]])
        assert (radius((1 - p) * np.kron(missed, missed) + p * np.kron(drawn, drawn)) > 1) is grows


# -- exact second moments: where the limit is reached, and what it costs to ignore it ------------------------------


def test_sampling_can_diverge_where_its_mean_and_full_participation_are_stable():
    w, visit, one, both = np.full(2, 0.5), flow([0.01, 20.0]), law_of(uniform(1), 2), law_of(uniform(2), 2)
    a, b = 0.1, 14.0
    assert a * b < 2 * (1 - a)
    assert mean_square_radius(a, b, w, visit, one) == pytest.approx(1.0059, abs=5e-5)
    assert mean_radius(a, b, w, visit, one) == pytest.approx(0.951, abs=5e-4)
    assert mean_square_radius(a, b, w, visit, both) == pytest.approx(0.813, abs=5e-4)


@pytest.mark.parametrize(("n", "printed"), [(10, 1.0098), (30, 1.0040)])
def test_one_stiff_client_among_flat_ones_diverges_at_b_12(n, printed):
    visit = flow([30.0] + [1e-6] * (n - 1))
    assert mean_square_radius(0.1, 12.0, np.full(n, 1 / n), visit, law_of(uniform(1), n)) == pytest.approx(
        printed, abs=5e-5
    )


@pytest.mark.parametrize(("size", "n"), [(1, 2), (1, 10), (2, 10), (5, 10)])
@pytest.mark.parametrize("kind", [proximal, flow])
def test_the_limit_is_sharp_for_one_stiff_client_among_flat_ones(size, n, kind):
    a, limit = 0.1, equal_weights_limit(size, n)
    visit, w, law = kind([1e5] + [1e-6] * (n - 1)), np.full(n, 1 / n), law_of(uniform(size), n)
    assert mean_square_radius(a, 0.98 * limit / a, w, visit, law) < 1
    assert mean_square_radius(a, 1.02 * limit / a, w, visit, law) > 1


@pytest.mark.parametrize(("ab", "exponent"), [(1.5, -0.50), (2.0, -0.28), (3.0, 0.11)])
def test_single_runs_typically_shrink_somewhat_beyond_the_limit(ab, exponent):
    """E log|1 - ab X| with X ~ Exp(1): the growth by visit of one stiff client among many, one client per round."""
    u = (np.arange(2_000_000) + 0.5) / 2_000_000
    assert np.log(np.abs(1 + ab * np.log(u))).mean() == pytest.approx(exponent, abs=5e-3)


@pytest.mark.parametrize(("b", "spread", "stable"), [(3, 1e4, True), (5, 1e8, True), (9, 1e8, True), (11, 1e8, False)])
def test_one_of_thirty_equal_clients_is_safe_up_to_b_9(b, spread, stable):
    w, law = np.full(30, 1 / 30), law_of(uniform(1), 30)
    visit = flow([spread**0.5] + 29 * [spread**-0.5])
    assert (mean_square_radius(0.1, b, w, visit, law) < 1) is stable


@pytest.mark.parametrize(("b", "printed"), [(3.0, 1.012), (5.0, 1.038), (1.0, 0.994)])
def test_a_heavy_and_stiff_client_diverges_under_uniform_draws_and_not_if_drawn_by_weight(b, printed):
    visit = flow([100.0] + 29 * [0.01])
    assert mean_square_radius(0.1, b, HEAVY, visit, law_of(uniform(1), 30)) == pytest.approx(printed, abs=5e-4)
    if b > 1:
        by_weight = {(i,): p for i, p in enumerate(HEAVY)}
        assert mean_square_radius(0.1, b, HEAVY, visit, by_weight) == pytest.approx(0.995, abs=5e-4)


def test_a_random_weight_of_the_cohort_needs_the_mean_and_the_square_of_the_share():
    """The rule puts w / E W for the share c; exact is (2 E c - E c^2) p / (1 - p + p E c / 2), within the safe half."""
    n, a, size = 5, 0.1, 2
    w = np.array([0.3, 0.05, 0.4, 0.05, 0.2])
    visit, law = flow([1e5] + [1e-6] * (n - 1)), law_of(uniform(size), n)
    share = np.array([w[0] / w[list(s)].sum() for s in law if 0 in s])
    p, c, c2 = size / n, share.mean(), (share**2).mean()
    exact = p * (2 * c - c2) / (1 - p + p * c / 2) / w[0]
    assert (
        mean_square_radius(a, 0.98 * exact / a, w, visit, law)
        < 1
        < mean_square_radius(a, 1.02 * exact / a, w, visit, law)
    )
    assert 0.5 * client_limits(w, Uniform(size))[0] < exact


# -- full participation: Theorem A -----------------------------------------------------------------------------------


def largest_b(a, steps):
    """By the theorem: the least (4 - 2 H - 2 a kappa) / (a H) over curvatures with lr h in (0, 1]."""
    H, kappa = descent(steps * np.linspace(1e-3, 1, 4000), steps)
    return float(((4 - 2 * H - 2 * a * kappa) / (a * H)).min())


@pytest.mark.parametrize(
    ("steps", "printed"),
    [(1, (18.0, 4.67, 0.0)), (2, (19.0, 5.65, 0.91)), (5, (19.5, 6.12, 1.32)), (300, (19.7, 6.35, 1.54))],
)
def test_the_largest_b_with_everybody_in_every_round(steps, printed):
    curvatures = steps * np.linspace(0.01, 1, 100)
    for a, value in zip((0.1, 0.3, 1.0), printed, strict=True):
        b = largest_b(a, steps)
        assert b == pytest.approx(value, abs=0.06 if value > 10 else 6e-3)
        blocks = lambda b, a=a: max(radius(two_by_two(a, b, *descent(h, steps))) for h in curvatures)  # noqa: E731
        if b > 0.1:
            assert blocks(b - 0.05) < 1
        assert blocks(b + 0.05) > 1
        assert 2 * (1 - a) / a <= b + 1e-9  # the rule that does not know the number of steps


def two_by_two(a, b, H, kappa):
    dual = np.array([-a * H, 1 - a * kappa])
    return np.array([np.array([1 - H, -kappa]) + b * dual, dual])


def test_theorem_a_holds_for_hessians_that_do_not_commute():
    rng, n, d = np.random.default_rng(0), 3, 3
    for _ in range(60):
        a, w = rng.uniform(0.05, 0.95), rng.dirichlet(np.ones(n))
        b, steps = rng.uniform(0, 1) * 2 * (1 - a) / a, int(rng.integers(1, 6))
        maps = [visit_of(rng, d, steps) for _ in range(n)]
        whole = np.eye((n + 1) * d)
        for i, (H, K) in enumerate(maps):
            rows = slice((i + 1) * d, (i + 2) * d)
            whole[rows, :d] -= a * H
            whole[rows, rows] -= a * K
        duals = sum(w[i] * whole[(i + 1) * d : (i + 2) * d] for i in range(n))
        whole[:d, :d] -= sum(w[i] * H for i, (H, _) in enumerate(maps))
        whole[:d, d:] -= np.hstack([w[i] * K for i, (_, K) in enumerate(maps)])
        whole[:d] += b * duals
        assert radius(whole) < 1


def visit_of(rng, d, steps):
    """H and K of gradient steps with lr |A| <= 1, in units of tau."""
    basis = np.linalg.qr(rng.normal(size=(d, d)))[0]
    H, kappa = descent(steps * 10 ** rng.uniform(-2, 0, d), steps)
    return basis * H @ basis.T, basis * kappa @ basis.T
