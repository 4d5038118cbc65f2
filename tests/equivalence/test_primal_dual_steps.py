"""Claims of docs/primal_dual.md on FedPrimalDual itself: its limits if everybody takes part, and its fixed points."""

from __future__ import annotations

import pytest
import torch

from lightning_fed import Exact, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import FedPrimalDual, fedprimaldual
from lightning_fed.laboratory import History
from lightning_fed.prox import L1

ALIKE = [Quadratic([[1.0, 0.0], [0.0, 0.2]], [1.0 + i, 2.0 - i]) for i in range(2)]  # lr * h = 1 with lr = 1
TURNED = [Quadratic([[0.6, s], [s, 0.5]], [1.0, 2.0 * s], num_examples=n) for s, n in ((0.4, 1), (-0.3, 5), (0.1, 2))]


def optimum(clients, w):
    A, b = (sum(x * getattr(f, name) for x, f in zip(w, clients, strict=True)) for name in ("A", "b"))
    return torch.linalg.solve(A, b)


def distance(b, clients, weights="uniform", rounds=200):
    """How far one gradient step per visit with a = 0.1 ends from the solution."""
    n = torch.tensor([f.num_examples if weights == "samples" else 1.0 for f in clients], dtype=torch.float64)
    algorithm = FedPrimalDual(a=0.1, b=b, weights=weights)
    history = simulate(algorithm, clients, rounds=rounds, solver=GradientDescent(1, 1.0))
    return float((history.x_bar - optimum(clients, n / n.sum())).norm())


def test_one_step_with_a_slow_dual_converges_at_b_17_and_not_at_b_19():
    assert distance(17.0, ALIKE) < 1e-6
    assert distance(19.0, ALIKE) > 1e6
    assert distance(17.0, TURNED, weights="samples") < 1e-6  # any weights and Hessians


def test_with_everybody_it_is_quasi_hyperbolic_momentum():
    a, b, lr = 0.1, 3.0, 0.4
    history = simulate(FedPrimalDual(a=a, b=b), TURNED, rounds=20, solver=GradientDescent(1, lr))
    nu, lam = 1 - 1 / (b * (1 - a)), b * lr
    x, m = torch.zeros(2, dtype=torch.float64), torch.zeros(2, dtype=torch.float64)
    for server in history.server[1:]:
        gradient = sum(f.grad(x) for f in TURNED) / 3
        m = (1 - a) * m + a * gradient
        x = x - lam * (nu * m + (1 - nu) * gradient)
        assert torch.allclose(server.x_bar, x, rtol=0, atol=1e-13)


@pytest.mark.parametrize("solver", [Exact(), GradientDescent(4, 0.3)], ids=repr)
@pytest.mark.parametrize(("rho", "sigma", "lam"), [(0.5, 2.0, 0.1), (1.0, 0.1, 5.0), (2.0, 3.0, 3.0)])
def test_a_solution_is_a_fixed_point_for_all_steps(solver, rho, sigma, lam):
    best, z_bar = torch.tensor([1.0, 0.0], dtype=torch.float64), torch.tensor([0.1, -0.03], dtype=torch.float64)
    own = [torch.tensor(row, dtype=torch.float64) for row in ([0.5, 1.0], [-2.0, 0.3])]
    duals = [*own, 3 * z_bar - sum(own)]  # their mean is a subgradient of g at best
    clients = [Quadratic(f.A, f.A @ best + z) for f, z in zip(TURNED, duals, strict=True)]
    start = History(
        [fedprimaldual.ServerState(best, z_bar)],
        [[fedprimaldual.ClientState(z) for z in duals]],
        cohorts=[],
        answers=[],
    )
    algorithm = FedPrimalDual(rho=rho, sigma=sigma, lam=lam, g=L1(0.1))
    history = simulate(algorithm, clients, cohorts=[{0}, {1, 2}, {0, 1, 2}, {2}], solver=solver, resume=start)
    assert torch.allclose(history.x_bar, best, rtol=0, atol=1e-13)
    for state, z in zip(history.clients[-1], duals, strict=True):
        assert torch.allclose(state.z_i, z, rtol=0, atol=1e-12)


def test_a_cycle_of_too_long_steps_is_a_false_fixed_point():
    there_and_back = simulate(FedPrimalDual(), [Quadratic.scalar(1.0, 0.0)], [1.0], 5, solver=GradientDescent(2, 2.0))
    assert float(there_and_back.x_bar) == 1.0
    shorter = simulate(FedPrimalDual(), [Quadratic.scalar(1.0, 0.0)], [1.0], 200, solver=GradientDescent(2, 1.0))
    assert abs(float(shorter.x_bar)) < 1e-6
