"""Advice keeps what it promises, on quadratics whose curvature is as measured."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.problems import LAW
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedDyn, FedProx
from lightning_fed.algorithms.compressed import Compressed
from lightning_fed.theory.advice import CurvatureRange, advise, practical_penalty
from lightning_fed.transforms import TopK


def seen(L: float = 4.0, lowest: float = 0.0) -> CurvatureRange:
    return CurvatureRange(L, L, 10, lowest, "hessian")


def verdicts(algorithm: Algorithm, lr: float | None = 0.05, local_steps: int = 20, **kwargs: float) -> dict[str, str]:
    return {advice.setting: advice.verdict for advice in advise(seen(**kwargs), algorithm, lr, local_steps)}


def values(algorithm: Algorithm, lr: float | None = 0.05, local_steps: int = 20, **kwargs: float) -> dict[str, float]:
    return {advice.setting: advice.advised for advice in advise(seen(**kwargs), algorithm, lr, local_steps)}


def left_over(lr: float, rho: float, steps: int, curvatures: list[float]) -> float:
    """What is left of the gradient of the local problem along its worst direction, step by step."""
    slope = torch.ones(len(curvatures), dtype=torch.float64)
    for _ in range(int(steps)):
        slope = slope - lr * (torch.tensor(curvatures, dtype=torch.float64) + rho) * slope
    return float(slope.abs().max())


@given(st.floats(0.1, 100), st.floats(-1, 1), st.floats(0.01, 100), st.integers(1, 400))
@LAW
def test_what_is_advised_solves_the_local_problem_to_a_tenth(L: float, low: float, eta: float, steps: int) -> None:
    advised = values(FedADMM(eta=eta), 0.1 / L, steps, L=L, lowest=low * L)
    spread = [L, low * L, 0.5 * (L + low * L), 0.0]
    assert left_over(advised["lr"], advised["eta"], advised["local_steps"], spread) <= 0.1 * (1 + 1e-9)
    assert advised["eta"] + min(low * L, 0.0) > 0  # strongly convex
    assert advised["lr"] * (L + advised["eta"]) < 2


@given(st.floats(0.1, 100), st.floats(-0.99, 0), st.integers(1, 300))
@LAW
def test_the_practical_penalty_is_the_least_for_so_many_steps(L: float, low: float, steps: int) -> None:
    rho = practical_penalty(seen(L, low * L), steps)
    assert left_over(1 / (L + rho), rho, steps, [low * L]) == pytest.approx(0.1)


@pytest.mark.parametrize(
    ("eta", "verdict", "advised"),
    [(10.0, "ok", 10.0), (2.0, "ok", 2.0), (0.1, "too small", 4 * (10 ** (1 / 20) - 1)), (100.0, "too large", 10.5476)],
)
def test_a_penalty_is_judged_by_the_bound_and_by_what_local_steps_can_do(
    eta: float, verdict: str, advised: float
) -> None:
    assert verdicts(FedADMM(eta=eta), 0.005)["eta"] == verdict
    assert values(FedADMM(eta=eta), 0.005)["eta"] == pytest.approx(advised, rel=1e-4)
    reason = advise(seen(), FedADMM(eta=eta), 0.005, 20)[0].reason
    assert "above 9.589 = 2.4 L" in reason
    assert ("nothing is guaranteed" in reason) == (eta == 2.0)


def test_a_step_is_judged_the_other_way_round() -> None:
    assert verdicts(FedDR(eta_hat=10.0))["eta_hat"] == "too large"
    assert verdicts(FedDR(eta_hat=0.005), 0.001)["eta_hat"] == "too small"
    assert 1 / values(FedDR(eta_hat=10.0))["eta_hat"] == pytest.approx(values(FedADMM(eta=0.1))["eta"])
    assert values(Compressed(FedDR(eta_hat=0.1), TopK(1)))["eta_hat"] == pytest.approx(0.1)


def test_steps_that_diverge_are_called_out_from_the_limit_on() -> None:
    limit = 2 / (4 + 10)
    assert verdicts(FedADMM(eta=10.0), 1.01 * limit) == {
        "eta": "ok",
        "alpha": "ok",
        "lr": "diverges",
        "local_steps": "diverges",
    }
    assert left_over(1.01 * limit, 10.0, 200, [4.0]) > 10
    assert verdicts(FedADMM(eta=10.0), 0.99 * limit)["lr"] == "ok"
    assert left_over(0.99 * limit, 10.0, 200, [4.0]) < 0.1
    assert values(FedADMM(eta=10.0), 1.0)["lr"] == pytest.approx(1 / 14)
    assert verdicts(FedADMM(eta=10.0), 1e-5)["lr"] == "too small"


def test_too_few_steps_are_called_out_and_enough_are_not() -> None:
    lr, eta = 0.01, 10.0
    enough = math.ceil(math.log(0.1) / math.log(1 - lr * eta))  # the slowest direction has curvature eta
    assert verdicts(FedADMM(eta=eta), lr, enough)["local_steps"] == "ok"
    assert verdicts(FedADMM(eta=eta), lr, enough - 1)["local_steps"] == "too small"
    assert left_over(lr, eta, enough, [0.0, 4.0]) <= 0.1 < left_over(lr, eta, enough - 1, [0.0, 4.0])
    assert f"{enough} are enough" in advise(seen(), FedADMM(eta=eta), lr, 5)[-1].reason


def test_relaxation_is_judged_by_the_exact_range() -> None:
    assert verdicts(FedADMM(eta=20.0, alpha=1.5), 0.01)["alpha"] == "ok"  # 2 - 8/20 = 1.6
    assert verdicts(FedADMM(eta=20.0, alpha=1.7), 0.01)["alpha"] == "too large"
    assert values(FedADMM(eta=20.0, alpha=2.0), 0.01)["alpha"] == 1.0
    assert "up to 2 - 2 L / penalty = 1.6" in advise(seen(), FedADMM(eta=20.0), 0.01, 20)[1].reason


@pytest.mark.parametrize("algorithm", [FedAvg(), FedProx(mu=0.5), FedDyn(alpha=0.5)], ids=repr)
def test_the_bound_is_not_told_of_others(algorithm: Algorithm) -> None:
    found = verdicts(algorithm)
    assert found.keys() == {"lr", "local_steps"}
    assert found["local_steps"] == ("not judged" if not algorithm.traits.penalty else "too small")


def test_what_cannot_be_judged_is_not() -> None:
    found = verdicts(FedADMM(eta=10.0), lr=None)
    assert found == {"eta": "ok", "alpha": "ok", "lr": "not judged", "local_steps": "not judged"}
    assert verdicts(FedADMM(eta=1.0), 0.01, lowest=-2.0)["local_steps"] == "not judged"  # not convex
    unknown = values(FedADMM(eta=0.1), lowest=math.nan)
    assert unknown["eta"] > 4.0  # the worst is assumed: -L
