"""The calculator: asynchronous steps, and how exact local solutions have to be."""

from __future__ import annotations

import math

import numpy as np
import pytest
from helpers.problems import LAW, agrees
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.theory.bounds import (
    async_step_limit,
    distance_to_solution,
    residual_for,
    summable_error2,
)


@pytest.mark.parametrize(
    ("alpha", "n", "tau", "printed"),
    [
        (0.5, 30, 0, "0.540312"),
        (0.5, 30, 3, "0.540312"),
        (0.5, 30, 10, "0.464068"),
        (0.9, 30, 3, "0.149859"),
        (0.5, 6, 2, "0.517913"),
    ],
)
def test_the_asynchronous_step_is_reproduced_to_every_printed_digit(alpha, n, tau, printed):
    assert agrees(async_step_limit(1, alpha, n, tau), printed)
    assert async_step_limit(4, alpha, n, tau) == pytest.approx(async_step_limit(1, alpha, n, tau) / 4, rel=1e-14)


def test_more_delay_and_more_relaxation_need_shorter_steps():
    by_delay = [async_step_limit(1, 0.5, 10, tau) for tau in range(8)]
    assert by_delay == sorted(by_delay, reverse=True)
    assert by_delay[0] == by_delay[2] > by_delay[3]  # 2 tau^2 <= n changes nothing
    by_alpha = [async_step_limit(1, alpha, 10, 2) for alpha in (0.1, 0.5, 0.9, 0.999)]
    assert by_alpha == sorted(by_alpha, reverse=True)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((1, 1.0, 30, 0), r"alpha must be positive and below 1/\(1\+c\) = 1 for n=30 and tau=0, got 1\.0"),
        ((1, 0.9, 30, 30), r"below 1/\(1\+c\) = 0\.337079 .*got 0\.9\. Lower it, or allow less delay"),
        ((1, 0.0, 30, 1), "alpha must be positive and below"),
        ((1, math.nan, 30, 1), "alpha must be positive and below"),
        ((0, 0.5, 30, 1), "L must be positive"),
        ((1, 0.5, 0, 1), "n must be a whole number >= 1, got 0"),
        ((1, 0.5, 3, -1), "tau must be a whole number >= 0, got -1"),
        ((1, 0.5, 3, 1.5), r"tau must be a whole number >= 0, got 1\.5"),
    ],
    ids=str,
)
def test_asynchronous_settings_without_a_condition_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        async_step_limit(*arguments)


def test_the_asynchronous_boundary_of_the_relaxation_is_refused():
    limit = 1 / (1 + (2 * 10**2 - 30) / 30**2)
    with pytest.raises(ValueError, match="alpha must be positive and below"):
        async_step_limit(1, limit, 30, 10)
    assert async_step_limit(1, limit * (1 - 1e-6), 30, 10) > 0


# -- accuracies of local solutions ----------------------------------------------------------------------------------


@given(st.floats(1e-6, 1e3), st.integers(1, 300))
@LAW
def test_allowed_errors_add_up_to_their_budget(D, K):
    allowed = [summable_error2(k, D) for k in range(K)]
    assert math.fsum(allowed) == pytest.approx(D * (1 - 1 / (K + 1)), rel=1e-12)
    assert allowed[0] == D / 2
    assert allowed == sorted(allowed, reverse=True)


def test_allowed_errors_add_up_to_the_whole_budget_in_the_end():
    assert math.fsum(summable_error2(k, 0.3) for k in range(200_000)) == pytest.approx(0.3, rel=1e-5)


def test_wrong_rounds_and_budgets_are_refused():
    with pytest.raises(ValueError, match="k must be a whole number >= 0, got -1"):
        summable_error2(-1, 1.0)
    with pytest.raises(ValueError, match=r"D must be positive and finite, got 0"):
        summable_error2(0, 0)


@given(st.lists(st.floats(-2, 2), min_size=1, max_size=5), st.floats(0.01, 5), st.integers(0, 2**32 - 1))
@LAW
def test_the_certificate_holds_on_quadratics_of_any_curvature(eigenvalues, margin, seed):
    a, rng = np.asarray(eigenvalues), np.random.default_rng(seed)
    rho, b, x = 2.0 + margin, rng.normal(size=a.size), rng.normal(size=a.size)
    solution = b / (a + rho)  # of a/2 x^2 - b x + rho/2 x^2
    residual = float(np.linalg.norm((a + rho) * x - b))
    distance = float(np.linalg.norm(x - solution))
    assert distance <= distance_to_solution(residual, rho, 2.0) * (1 + 1e-9)
    assert residual_for(distance_to_solution(residual, rho, 2.0), rho, 2.0) == pytest.approx(residual)


def test_the_certificate_is_tight_where_the_curvature_is_least():
    rho, L, x = 3.0, 1.0, 0.7
    assert distance_to_solution(abs((rho - L) * x), rho, L) == pytest.approx(x)  # f = -x^2/2, solution 0
    assert distance_to_solution(0.0, rho, L) == 0


@pytest.mark.parametrize("rho", [1.0, 0.5, 0.0, math.nan])
def test_there_is_no_certificate_without_strong_convexity(rho):
    for ask in (distance_to_solution, residual_for):
        with pytest.raises(ValueError, match=rf"rho must be finite and exceed L = 1, got {rho}\. Raise the penalty"):
            ask(0.1, rho, 1.0)


def test_residuals_and_distances_are_not_negative():
    with pytest.raises(ValueError, match="residual must be non-negative"):
        distance_to_solution(-0.1, 2.0, 1.0)
    with pytest.raises(ValueError, match="epsilon must be positive"):
        residual_for(0.0, 2.0, 1.0)
