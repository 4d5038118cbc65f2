"""Local work until it is good enough: the rules, the solver in `simulate`, and what that does to FedADMM and FedPD."""

from __future__ import annotations

import warnings

import numpy as np
import pytest
import torch
from helpers.problems import DOUGLAS_RACHFORD_FULL, FULL, PARTIAL, close, golden, gradient, in_numpy

from lightning_fed import GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedADMM, FedDR, FedLin, FedMid, FedPD, Scaffold
from lightning_fed.theory import Absolute, Relative, Summable, Tolerance

ETA, LR, L = 5.0, 0.1, 3.0


def errors_of_clients(algorithm: FedADMM, tolerance: Tolerance | float, rounds: int = 8) -> list[list[float]]:
    """Distance of every x_i to the exact solution of its question, by round; solved by numpy."""
    clients, x0 = golden()
    history = simulate(algorithm, clients, x0, rounds=rounds, solver=GradientDescent(2000, LR, tolerance))
    found = []
    for k in range(rounds):
        x_bar, row = history.server[k].x_bar.numpy(), []
        for i, (A, b) in enumerate(in_numpy(clients)):
            z = history.clients[k][i].z_i.numpy()
            exact = np.linalg.solve(A + ETA * np.eye(2), b - z + ETA * x_bar)
            row.append(float(np.linalg.norm(history.clients[k + 1][i].x_i.numpy() - exact)))
        found.append(row)
    return found


def test_with_lipschitz_constant_the_point_reached_is_as_near_to_the_exact_one_as_was_asked() -> None:
    found = errors_of_clients(FedADMM(eta=ETA), Absolute(0.02, L=L))
    assert max(map(max, found)) <= 0.02
    assert max(map(max, found)) > 0.002  # and it does no more work than that


def test_a_summable_schedule_allows_less_in_every_round_and_its_sum_in_all() -> None:
    found = errors_of_clients(FedADMM(eta=ETA), Summable(D=0.01, L=L))
    for k, row in enumerate(found):
        assert max(row) ** 2 <= 0.01 / ((k + 1) * (k + 2))
    assert sum(max(row) ** 2 for row in found) <= 0.01


@pytest.mark.parametrize("tolerance", [0.05, Absolute(0.05), Relative(0.3)], ids=repr)
def test_without_lipschitz_constant_it_is_the_gradient_that_is_bounded(tolerance: Tolerance | float) -> None:
    f, start = Quadratic([[2.0, 0.5], [0.5, 1.0]], [1.0, -1.0]), torch.tensor([4.0, 2.0], dtype=torch.float64)
    linear, center = torch.tensor([0.3, -0.7], dtype=torch.float64), torch.tensor([-1.0, 4.0], dtype=torch.float64)

    def residual(x: torch.Tensor) -> float:
        return float((f.A @ x - f.b + linear + 1.5 * (x - center)).norm())

    limit = 0.3 * residual(start) if isinstance(tolerance, Relative) else 0.05
    found = GradientDescent(500, LR, tolerance)(f, start, linear, 1.5, center)
    assert found.reached
    assert residual(found.x) <= limit
    assert found.residual == pytest.approx(residual(found.x), rel=1e-12)
    assert found.lr_sum == pytest.approx(found.steps * LR)
    before = GradientDescent(found.steps - 1, LR)(f, start, linear, 1.5, center).x
    assert residual(before) > limit  # no step too many
    same = GradientDescent(found.steps, LR)(f, start, linear, 1.5, center)
    assert torch.equal(found.x, same.x)
    assert found.loss == pytest.approx(same.loss, rel=1e-15)


def test_a_start_that_is_good_enough_is_the_answer() -> None:
    f, x = Quadratic.scalar(1.0, 2.0), torch.tensor([2.0], dtype=torch.float64)
    found = GradientDescent(10, LR, 1e-9)(f, x, 0 * x, 1.0, x)
    assert (found.steps, found.lr_sum, found.reached, found.residual) == (0, 0.0, True, 0.0)
    assert found.x is x


def test_errors_that_sum_up_lead_to_the_minimiser_and_a_coarse_tolerance_does_not() -> None:
    clients, x0 = golden()

    def steepest(tolerance: Tolerance | float) -> float:
        """The largest gradient of the objective in the last 100 of 400 rounds."""
        solver = GradientDescent(5000, LR, tolerance)
        history = simulate(FedADMM(eta=ETA), clients, x0, rounds=400, solver=solver)
        return max(float(gradient(clients, state.x_bar).norm()) for state in history.server[-100:])

    assert steepest(0.3) > 0.02
    assert steepest(Summable(D=1.0)) < 5e-3  # 1/400 is still allowed in the last round
    assert steepest(1e-10) < 1e-9


def test_partial_participation_converges_too() -> None:
    clients, x0 = golden()
    solver = GradientDescent(5000, LR, Summable(D=1e-4, L=L))
    history = simulate(FedADMM(eta=ETA), clients, x0, cohorts=PARTIAL * 150, solver=solver)
    assert float(gradient(clients, history.x_bar).norm()) < 1e-3


def test_fedpd_with_oracle_one_until_the_squared_gradient_is_small() -> None:
    clients, x0 = golden()
    tight = simulate(FedPD(eta_hat=0.5), clients, x0, cohorts=FULL, solver=GradientDescent(9999, LR, Absolute(1e-13)))
    for state, expected in zip(tight.server[1:], DOUGLAS_RACHFORD_FULL, strict=True):
        close(state.x_bar, expected, 1e-9)
    eps1 = 1e-3
    loose = simulate(
        FedPD(eta_hat=0.5), clients, x0, cohorts=FULL, solver=GradientDescent(999, LR, Absolute(eps1**0.5))
    )
    for k in range(4):
        for i, (A, b) in enumerate(in_numpy(clients)):
            old, x_i = loose.clients[k][i], loose.clients[k + 1][i].x_i.numpy()
            x_0i = loose.server[k].x_bar.numpy()
            squared = float(np.sum((A @ x_i - b + old.lam_i.numpy() + (x_i - x_0i) / 0.5) ** 2))
            assert squared <= eps1 * (1 + 1e-12)
            assert squared == pytest.approx(loose.answers[k][i].residual ** 2, rel=1e-6)
    assert abs(float(loose.x_bar[0]) - DOUGLAS_RACHFORD_FULL[3][0]) > 1e-4


def test_what_is_not_reached_is_counted_and_said_once() -> None:
    clients, x0 = golden()
    with pytest.warns(
        UserWarning, match=r"local solutions did not reach their tolerance: after 2 steps .* up to"
    ) as seen:
        history = simulate(FedADMM(eta=ETA), clients, x0, rounds=5, solver=GradientDescent(2, LR, 1e-9))
    assert len(seen) == 1
    assert not history.answers[0][0].reached
    assert all(answer.residual > 1e-9 for answer in history.answers[0].values())
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        history = simulate(FedADMM(eta=ETA), clients, x0, cohorts=PARTIAL, solver=GradientDescent(2, LR))
    assert [sorted(answers) for answers in history.answers] == PARTIAL


def test_an_exchange_before_round_0_is_allowed_as_much_as_round_0() -> None:
    assert Summable(2.0).limit(-1, 1.0, 1.0) == Summable(2.0).limit(0, 1.0, 1.0) == 1.0
    clients, x0 = golden()
    solver = GradientDescent(999, LR, Summable(1e-4, L=L))
    history = simulate(FedDR(eta_hat=1 / ETA, init="prox"), clients, x0, rounds=100, solver=solver)
    assert float(gradient(clients, history.x_bar).norm()) < 1e-3


@pytest.mark.parametrize("algorithm", [Scaffold(), FedMid()], ids=repr)
def test_algorithms_that_ask_for_steps_are_refused(algorithm: Scaffold | FedMid) -> None:
    clients, x0 = golden()
    with pytest.raises(ValueError, match=r"asks for steps, not for a minimiser.* Omit until="):
        simulate(algorithm, clients, x0, rounds=1, solver=GradientDescent(5, LR, 0.1))


def test_an_algorithm_without_a_penalty_may_stop_at_a_small_gradient() -> None:
    clients, x0 = golden()
    history = simulate(FedLin(), clients, x0, rounds=3, solver=GradientDescent(50, LR, 0.1))
    assert all(answer.residual <= 0.1 for answers in history.answers for answer in answers.values())
    with pytest.raises(ValueError, match=r"rho must be finite and exceed L = 3, got 0\.0\. Raise the penalty"):
        simulate(FedLin(), clients, x0, rounds=1, solver=GradientDescent(50, LR, Absolute(0.1, L=L)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Absolute(0.0), r"Absolute\.epsilon must be positive, got 0\.0"),
        (lambda: Absolute(0.1, L=-1.0), r"Absolute\.L must be positive, got -1\.0.*leave it out"),
        (lambda: Relative(1.0), r"Relative\.gamma must lie in \(0, 1\), got 1\.0"),
        (lambda: Summable(float("inf")), r"Summable\.D must be positive, got inf"),
        (lambda: GradientDescent(5, 0.1, -1e-3), r"Absolute\.epsilon must be positive, got -0\.001"),
    ],
)
def test_tolerances_that_mean_nothing_are_refused(make, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        make()


def test_a_tolerance_of_another_kind_is_refused() -> None:
    with pytest.raises(TypeError, match=r"A tolerance is a number, Absolute, Relative or Summable; got 'tight'"):
        GradientDescent(5, 0.1, "tight")  # type: ignore[arg-type]
