"""What the theorem asks for solves local problems, on quadratics whose curvature is as measured."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.problems import LAW
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.theory import eta_min
from lightning_fed.theory.guarantee import CurvatureRange, guarantee


def seen(L: float = 4.0, lowest: float = 0.0) -> CurvatureRange:
    return CurvatureRange(L, 0.9 * L, 10, lowest, "hessian")


def left_over(lr: float, rho: float, steps: int, curvatures: list[float]) -> float:
    """What is left of the gradient of the local problem along its worst direction, step by step."""
    slope = torch.ones(len(curvatures), dtype=torch.float64)
    for _ in range(int(steps)):
        slope = slope - lr * (torch.tensor(curvatures, dtype=torch.float64) + rho) * slope
    return float(slope.abs().max())


@given(st.floats(0.1, 100), st.floats(-1, 1))
@LAW
def test_what_is_guaranteed_solves_the_local_problem_to_a_tenth(L: float, low: float) -> None:
    found, spread = guarantee(seen(L, low * L)), [L, low * L, 0.5 * (L + low * L), 0.0]
    assert left_over(found.lr, found.eta, found.local_steps, spread) <= 0.1 * (1 + 1e-9)
    assert left_over(found.lr, found.eta, found.local_steps - 1, [min(low * L, 0.0)]) > 0.1  # not a step too many
    assert found.eta > eta_min(L, 0.05)
    assert found.lr * (L + found.eta) < 2


def test_the_values_for_a_known_curvature() -> None:
    found = guarantee(seen(4.0))
    assert found.eta == pytest.approx(1.1 * 4 * 2.397181)
    assert found.lr == pytest.approx(1 / (4 + found.eta))
    assert found.alpha == pytest.approx(2 - 8 / found.eta)
    assert found.local_steps == 2


def test_unknown_lowest_curvature_is_assumed_to_be_the_worst() -> None:
    assert guarantee(seen(lowest=math.nan)) == guarantee(seen(lowest=-4.0))
    assert guarantee(seen(lowest=math.nan)).local_steps > guarantee(seen()).local_steps
