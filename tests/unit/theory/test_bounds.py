"""The theory calculator against the tables of the specification."""

from __future__ import annotations

import math
from dataclasses import asdict
from fractions import Fraction

import numpy as np
import pytest
from helpers.problems import LAW, agrees
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.sampling import Systematic
from lightning_fed.theory.bounds import (
    Bounds,
    ExactBounds,
    eta_min,
    exact_eta_min,
)

# L, eta, gamma1, gamma2, gamma4, p_hat -> eta_min, q, beta, rho1, rho2, C1, C2, C3, as printed
TABLE = [
    (
        (1, 4, 1, 1, 0.05, 1 / 3),
        "2.397181 .412500 .129412 259.276471 255.026471 772.727273 200350.000 197115.909",
    ),
    (
        (2, 10, 0.5, 0.5, 0.05, 0.1),
        "4.794362 .512000 .164103 601.723077 591.323077 2632.500000 1584036.0 1557090.0",
    ),
    (
        (0.5, 2, 0.1, 0.1, 0.01, 1),
        "1.034411 .582500 .498396 634.732353 632.607353 27.588519 17511.326 17521.450",
    ),
    (
        (10, 40, 1, 1, 0.05, 1 / 3),
        "23.971809 .412500 1.294118 2592.764706 2550.264706 7727.272727 20035000.0 19711590.9",
    ),
]
NAMES = ("q", "beta", "rho1", "rho2", "C1", "C2", "C3")
ROW_ONE = {"L": 1.0, "eta": 4.0, "gamma1": 1.0, "gamma2": 1.0, "gamma4": 0.05, "p_hat": 1 / 3}
EXACT = {"L": 1.0, "eta": 4.0, "p_hat": 1 / 3}


@pytest.mark.parametrize(("arguments", "printed"), TABLE, ids=[f"L={row[0][0]}" for row in TABLE])
def test_the_table_of_constants_is_reproduced_to_every_printed_digit(arguments, printed):
    least, *constants = printed.split()
    assert agrees(eta_min(arguments[0], arguments[4]), least)
    bounds = Bounds(*arguments)
    for name, text in zip(NAMES, constants, strict=True):
        assert agrees(getattr(bounds, name), text), (name, getattr(bounds, name), text)


@pytest.mark.parametrize(
    ("gamma4", "printed"),
    [
        (0.01, "2.068821"),
        (0.05, "2.397181"),
        (0.1, "3.000000"),
        (0.2, "7.000000"),
        (0.24, "27.673991"),
        (0.249, "252.960932"),
    ],
)
def test_the_least_penalty_is_reproduced_to_every_printed_digit(gamma4, printed):
    assert agrees(eta_min(1, gamma4), printed)
    assert eta_min(3, gamma4) == pytest.approx(3 * eta_min(1, gamma4), rel=1e-14)


@given(st.floats(1e-6, 0.2499), st.floats(0.01, 100))
@LAW
def test_the_least_penalty_is_where_q_vanishes_in_the_form_of_the_paper_too(gamma4, L):
    least = eta_min(L, gamma4)
    paper = 4 * L * (1 + 2 * gamma4) / (math.sqrt(9 - 16 * gamma4 * (1 + 4 * gamma4)) - 1)
    assert least == pytest.approx(paper, rel=1e-9)
    Lh = L / least
    assert 2 - (Lh + 1) - 2 * Lh**2 - 4 * gamma4 * (1 + Lh**2) == pytest.approx(0, abs=1e-12)
    assert Bounds(L, least * 1.001, 1, 1, gamma4, 1).q > 0


def test_the_least_penalty_tends_to_twice_the_lipschitz_constant():
    assert eta_min(1.7, 1e-12) == pytest.approx(2 * 1.7, rel=1e-10)


@given(st.floats(0.01, 100))
@LAW
def test_scaling_loss_and_penalty_scales_the_constants(t):
    one, other = Bounds(**ROW_ONE), Bounds(**ROW_ONE | {"L": t, "eta": 4 * t})
    powers = {"q": 0, "beta": 1, "rho1": 1, "rho2": 1, "C1": 1, "C2": 2, "C3": 2}
    for name, power in powers.items():
        assert getattr(other, name) == pytest.approx(t**power * getattr(one, name), rel=1e-9)


def test_the_corollary_gives_the_rounds_of_the_specification():
    bounds = Bounds(**ROW_ONE)
    assert bounds.rounds(epsilon2=1, gap=10, D=0) == 7727
    assert bounds.rounds(epsilon2=1, gap=10, D=0.01) == 11701
    assert bounds.rounds(epsilon2=1, gap=0, D=0) == 0


@given(st.floats(0.01, 10), st.floats(0, 100), st.floats(0, 1))
@LAW
def test_after_the_rounds_of_the_corollary_and_not_before_the_mean_is_small_enough(epsilon2, gap, D):
    bounds = Bounds(**ROW_ONE)
    K = bounds.rounds(epsilon2, gap, D)
    assert bounds.mean_square(K, gap, D) <= epsilon2 * (1 + 1e-12)
    if K:
        assert bounds.mean_square(K - 1, gap, D) >= epsilon2 * (1 - 1e-12)


def test_the_sum_of_errors_has_no_default():
    with pytest.raises(TypeError, match="'D'"):
        Bounds(**ROW_ONE).rounds(epsilon2=1, gap=10)


def test_constants_agree_with_rational_arithmetic():
    L, eta, g1, g2, g4, p = (Fraction(x) for x in ("2", "10", "1/2", "1/2", "1/20", "1/10"))
    h = 1 / eta
    q = 2 - (L * h + 1) - 2 * L**2 * h**2 - 4 * g4 * (1 + L**2 * h**2)
    beta = p * q / (2 * h * (1 + g1) * (1 + L**2 * h**2))
    rho2 = 2 * (1 + h * L) ** 2 / (g4 * h) + (1 + h**2 * L**2) / h + q / (2 * h * (1 + L**2 * h**2) * g1)
    rho1 = rho2 + (1 + h**2 * L**2) / h
    C1 = 2 * (1 + h * L) ** 2 * (1 + g2) / (h**2 * beta)
    C3 = rho2 * C1 + (1 + h * L) ** 2 * (1 + g2) / (h**2 * g2)
    found = Bounds(2, 10, 0.5, 0.5, 0.05, 0.1)
    for name, value in zip(NAMES, (q, beta, rho1, rho2, C1, rho1 * C1, C3), strict=True):
        assert getattr(found, name) == pytest.approx(float(value), rel=1e-13)


def test_a_sampling_gives_its_least_probability():
    p_hat = Systematic(3, [1, 1, 2, 3, 5, 8]).inclusion_probabilities(6).min()
    assert pytest.approx(2 * Bounds(**ROW_ONE).C1) == Bounds(**ROW_ONE | {"p_hat": p_hat}).C1


def test_bounds_print_and_compare_with_all_their_constants():
    assert Bounds(**ROW_ONE) == Bounds(**ROW_ONE)
    assert list(asdict(Bounds(**ROW_ONE))) == [*ROW_ONE, *NAMES]


# -- refusals -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"L": 0.0}, r"^L must be positive and finite, got 0\.0\. It is the Lipschitz"),
        ({"L": -1.0}, r"^L must be positive and finite, got -1\.0"),
        ({"L": math.inf}, r"^L must be positive and finite, got inf"),
        ({"L": math.nan}, r"^L must be positive and finite, got nan"),
        ({"gamma4": 0.0}, r"^gamma4 must lie in \(0, 1/4\), got 0\.0\. .* try 0\.05"),
        ({"gamma4": -0.1}, r"^gamma4 must lie in \(0, 1/4\), got -0\.1"),
        ({"gamma4": 0.25}, r"^gamma4 must lie in \(0, 1/4\), got 0\.25"),
        ({"gamma4": 0.3}, r"^gamma4 must lie in \(0, 1/4\), got 0\.3"),
        ({"gamma4": math.nan}, r"^gamma4 must lie in \(0, 1/4\), got nan"),
        ({"gamma1": 0.0}, r"^gamma1 must be positive and finite, got 0\.0\. .* start from 1\.0"),
        ({"gamma1": -1.0}, r"^gamma1 must be positive"),
        ({"gamma2": 0.0}, r"^gamma2 must be positive"),
        ({"gamma2": -1.0}, r"^gamma2 must be positive"),
        ({"gamma2": "1"}, r"^gamma2 must be positive and finite, got '1'"),
        ({"p_hat": 0.0}, r"^p_hat must be positive and at most 1, got 0\.0\. .*inclusion_probabilities"),
        ({"p_hat": -0.5}, r"^p_hat must be positive and at most 1"),
        ({"p_hat": 1.01}, r"^p_hat must be positive and at most 1, got 1\.01"),
        ({"p_hat": math.nan}, r"^p_hat must be positive and at most 1"),
        (
            {"eta": 2.0},
            r"^eta must be finite and exceed eta_min\(L=1, gamma4=0\.05\) = 2\.39718086, got 2\.0\. Raise eta, or",
        ),
        ({"eta": -4.0}, r"^eta must be finite and exceed"),
        ({"eta": math.nan}, r"^eta must be finite and exceed"),
        ({"eta": math.inf}, r"^eta must be finite and exceed"),
    ],
    ids=str,
)
def test_what_the_theory_does_not_cover_is_refused(changed, message):
    with pytest.raises(ValueError, match=message):
        Bounds(**ROW_ONE | changed)


@pytest.mark.parametrize(("L", "eta", "gamma4"), [(1, 3, 0.1), (0.7, 2.1, 0.1), (1, 7, 0.2), (1 / 3, 7 / 3, 0.2)])
def test_a_penalty_exactly_on_the_boundary_is_refused_whatever_rounding_says(L, eta, gamma4):
    with pytest.raises(ValueError, match=rf"exceed eta_min\(.*\) = .*, got {eta}"):
        Bounds(L, eta, 1, 1, gamma4, 1)
    assert Bounds(L, eta * (1 + 1e-9), 1, 1, gamma4, 1).q > 0


def test_wrong_accuracies_and_gaps_are_refused():
    bounds, exact = Bounds(**ROW_ONE), ExactBounds(**EXACT)
    for wrong in (0, -1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match="epsilon2 must be positive"):
            bounds.rounds(wrong, 1, 0)
        with pytest.raises(ValueError, match="epsilon2 must be positive"):
            exact.rounds(wrong, 1)
    for wrong in (-1.0, math.nan, math.inf):
        with pytest.raises(ValueError, match=r"gap must be non-negative and finite, got .*F\(x0\) - F\*"):
            bounds.rounds(1, wrong, 0)
        with pytest.raises(ValueError, match="D must be non-negative and finite"):
            bounds.mean_square(1, 1, wrong)
        with pytest.raises(ValueError, match="gap must be non-negative"):
            exact.rounds(1, wrong)


# -- exact local solutions ------------------------------------------------------------------------------------------


def test_exact_solutions_are_the_limit_of_vanishing_gammas():
    exact = ExactBounds(**EXACT)
    assert pytest.approx(127.5, rel=1e-14) == exact.C1
    assert exact.rounds(epsilon2=1, gap=10) in (1274, 1275)  # 1275 up to rounding
    limit = Bounds(**ROW_ONE | {"gamma1": 1e-9, "gamma2": 1e-9, "gamma4": 1e-9})
    assert pytest.approx(127.5, rel=1e-7) == limit.C1
    assert limit.q == pytest.approx(exact.q, rel=1e-7)
    assert limit.beta == pytest.approx(exact.beta, rel=1e-7)


@given(st.floats(0.1, 10), st.floats(2.001, 50), st.floats(0.01, 1))
@LAW
def test_plain_exact_constants_have_the_closed_form_of_the_specification(L, factor, p_hat):
    h = 1 / (L * factor)
    closed = 4 * (1 + h * L) * (1 + L**2 * h**2) / (h * p_hat * (1 - 2 * L * h))
    assert pytest.approx(closed, rel=1e-9) == ExactBounds(L, L * factor, p_hat).C1


@given(st.floats(0.05, 1.95), st.floats(1.001, 20))
@LAW
def test_the_factors_of_q_multiply_to_its_sum_for_every_relaxation(alpha, factor):
    eta = factor * exact_eta_min(2.0, alpha)
    Lh = 2.0 / eta
    assert ExactBounds(2.0, eta, 0.5, alpha).q == pytest.approx(2 - alpha * (1 + Lh) - 2 * Lh**2, abs=1e-12)


@pytest.mark.parametrize("alpha", [0.2, 1.0, 1.5, 1.9])
def test_exact_penalties_up_to_the_boundary_are_refused(alpha):
    least = exact_eta_min(3.0, alpha)
    assert least == pytest.approx(6 / (2 - alpha))
    for eta in (least, 0.9 * least, 0.0):
        with pytest.raises(ValueError, match=r"eta must be finite and exceed 2 L / \(2 - alpha\) = .* lower alpha"):
            ExactBounds(3.0, eta, 0.5, alpha)
    assert ExactBounds(3.0, 1.001 * least, 0.5, alpha).C1 > 0


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"alpha": 0.0}, r"alpha must lie in \(0, 2\), got 0\.0"),
        ({"alpha": 2.0}, r"alpha must lie in \(0, 2\), got 2\.0\. .*not covered"),
        ({"alpha": math.nan}, r"alpha must lie in \(0, 2\)"),
        ({"L": 0.0}, "L must be positive"),
        ({"p_hat": 0.0}, "p_hat must be positive"),
        ({"p_hat": 2.0}, "p_hat must be positive and at most 1"),
    ],
    ids=str,
)
def test_exact_bounds_refuse_what_they_do_not_cover(changed, message):
    with pytest.raises(ValueError, match=message):
        ExactBounds(**EXACT | changed)


@pytest.mark.parametrize("alpha", [0.5, 1.0, 1.5])
def test_the_exact_bound_holds_on_quadratics_some_of_them_not_convex(alpha):
    """The whole inequality, on the mean over seeds: the gradient's mean square against C1 [V_0 - F*] / (K + 1)."""
    curvature, b, rounds = np.array([-1.0, 1.0, 0.9, 0.5, 0.8]), np.array([1.0, -2.0, 0.5, 3.0, 0.0]), 40
    n, L = len(curvature), 1.0
    eta = 1.2 * exact_eta_min(L, alpha)
    f_star = -(b.mean() ** 2) / (2 * curvature.mean())
    rng, means = np.random.default_rng(0), []
    for _ in range(50):
        y = np.full(n, 2.0)
        x = (b + eta * y) / (curvature + eta)
        x_bar = (2 * x - y).mean()
        v_0 = (curvature / 2 * x**2 - b * x + (curvature * x - b) * (x_bar - x) + eta / 2 * (x_bar - x) ** 2).mean()
        squares = []
        for _ in range(rounds):
            squares.append((curvature.mean() * x_bar - b.mean()) ** 2)
            drawn = rng.random(n) < 0.4
            y = np.where(drawn, y + alpha * (x_bar - x), y)
            x = (b + eta * y) / (curvature + eta)
            x_bar = (2 * x - y).mean()
        means.append(np.mean(squares))
    assert np.mean(means) <= ExactBounds(L, eta, 0.4, alpha).C1 * (v_0 - f_star) / rounds
