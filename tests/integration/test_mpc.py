"""Consensus MPC as the example does it, against an active-set method and the published numbers of the fixture."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from matplotlib.image import imread

from lightning_fed.algorithms import FedADMM
from lightning_fed.prox import Box

EXAMPLE = Path(__file__).parents[2] / "examples" / "consensus_mpc.py"
S_0 = np.array([1, 0, -1, 0, 0.5, 0, -0.5, 0])


@pytest.fixture(scope="module")
def mpc() -> SimpleNamespace:
    return SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


def step(s: np.ndarray, u: np.ndarray) -> np.ndarray:
    """The plant, cart by cart."""
    position, velocity = s[::2], s[1::2]
    moved = np.empty_like(s)
    moved[::2] = position + 0.1 * velocity
    moved[1::2] = velocity - 0.05 * position + 0.05 * np.roll(position, -1) + 0.1 * u
    return moved


def cost(i: int, s: np.ndarray, U: np.ndarray) -> float:
    """What agent ``i`` pays for the inputs ``U``, by simulation."""
    total = 0.0
    for u in U.reshape(10, 4):
        s = step(s, u)
        total += (10 * (i + 1) * s[2 * i] ** 2 + s[2 * i + 1] ** 2 + 0.1 * u[i] ** 2) / 2
    return total


def active_set(H: np.ndarray, h: np.ndarray, bound: float = 2.0) -> np.ndarray:
    """The minimiser of ``U'HU/2 + h'U`` in the box: guess who is at a bound, solve for the others, look again."""
    U, at = np.linalg.solve(H, -h), np.zeros(len(h))
    for _ in range(100):
        wants = U - (H @ U + h)
        now = np.where(abs(wants) >= bound, np.sign(wants), 0)
        free = now == 0
        U = bound * now
        U[free] = np.linalg.solve(H[np.ix_(free, free)], -h[free] - H[np.ix_(free, ~free)] @ U[~free])
        if np.array_equal(now, at):
            slope = H @ U + h
            assert abs(U).max() <= bound
            assert abs(slope[free]).max() < 1e-12
            assert (slope[~free] * now[~free] < 0).all()
            return U
        at = now
    raise AssertionError("the active set did not settle")


@pytest.fixture(scope="module")
def mean(mpc: SimpleNamespace) -> tuple[np.ndarray, np.ndarray]:
    """``H``, ``K`` of the mean cost."""
    H, K = (np.mean([m.numpy() for m in both], 0) for both in zip(*mpc.agents(), strict=True))
    return H, K


@pytest.fixture(scope="module")
def best(mean: tuple[np.ndarray, np.ndarray]) -> torch.Tensor:
    return torch.as_tensor(active_set(mean[0], mean[1] @ S_0))


@pytest.fixture(scope="module")
def least_cost(mpc: SimpleNamespace, mean: tuple[np.ndarray, np.ndarray]) -> float:
    H, K = mean
    _, _, J = mpc.closed_loop(lambda s: torch.as_tensor(active_set(H, K @ s.numpy())))
    return J


def error(mpc: SimpleNamespace, best: torch.Tensor, rounds: int, eta: float, size: int = 4, seed: int = 0) -> float:
    consensus = mpc.Consensus(rounds, size, seed=seed, algorithm=FedADMM(eta=eta, g=Box(-2.0, 2.0)))
    return float((consensus(mpc.START) - best).abs().max())


@pytest.mark.parametrize("i", range(4))
def test_an_agents_quadratic_is_its_cost_along_the_simulated_plant(mpc: SimpleNamespace, i: int) -> None:
    rng = np.random.default_rng(i)
    s, U = rng.normal(size=8), rng.normal(size=40)
    H_i, K_i = (m.numpy() for m in mpc.agents()[i])
    expected = cost(i, s, U) - cost(i, s, np.zeros(40))
    assert U @ H_i @ U / 2 + (K_i @ s) @ U == pytest.approx(expected, abs=1e-12)


def test_the_open_loop_solution_is_that_of_the_fixture(
    mpc: SimpleNamespace, mean: tuple[np.ndarray, np.ndarray], best: torch.Tensor
) -> None:
    H, K = mean
    U = best.numpy()
    assert max(float(torch.linalg.eigvalsh(H_i)[-1]) for H_i, _ in mpc.agents()) == pytest.approx(3.550289, abs=1e-6)
    assert pytest.approx(-14.33389894, abs=1e-8) == U @ H @ U / 2 + (K @ S_0) @ U
    assert np.linalg.norm(U) == pytest.approx(9.62713897, abs=1e-8)
    inputs = U.reshape(10, 4)
    np.testing.assert_array_equal(inputs[0], [-2, 2, -2, 2])
    np.testing.assert_allclose(inputs[3], [-1.216063, 2, -0.356605, -0.074837], atol=1e-6)
    np.testing.assert_allclose(inputs[9], [0.728504, -0.856439, 0.338410, -0.342250], atol=1e-6)
    assert np.mean(abs(U) == 2) == 0.325
    torch.testing.assert_close(mpc.centralised(mpc.START), best, rtol=0, atol=1e-11)


@pytest.mark.parametrize(
    ("eta", "after_50", "after_200"), [(0.05, 2e-1, 1.5e-5), (0.2, 1.2e-3, 2.5e-12), (1, 4e-1, 4.3e-3), (5, 1.3, 0.55)]
)
def test_fedadmm_approaches_the_solution_as_fast_as_the_fixture(
    mpc: SimpleNamespace, best: torch.Tensor, eta: float, after_50: float, after_200: float
) -> None:
    assert error(mpc, best, 50, eta) == pytest.approx(after_50, rel=0.05)
    assert error(mpc, best, 200, eta) == pytest.approx(after_200, rel=0.05, abs=1e-13)


@pytest.mark.parametrize("seed", range(3))
def test_two_of_four_agents_per_round_are_enough(mpc: SimpleNamespace, best: torch.Tensor, seed: int) -> None:
    assert 1e-9 < error(mpc, best, 200, 0.2, size=2, seed=seed) < 1e-5
    assert error(mpc, best, 1000, 0.2, size=2, seed=seed) < 1e-13


def test_the_centralised_closed_loop_is_that_of_the_fixture(mpc: SimpleNamespace, least_cost: float) -> None:
    states, inputs, J = mpc.closed_loop(mpc.centralised)
    assert pytest.approx(145.43548696, abs=1e-7) == J
    assert pytest.approx(least_cost, rel=1e-10) == J
    assert float(states[-1].norm()) == pytest.approx(0.003215, abs=1e-6)
    assert inputs.abs().max() <= 2
    s = S_0
    for u, after in zip(inputs.numpy(), states[1:].numpy(), strict=True):
        s = step(s, u)
        np.testing.assert_allclose(after, s, atol=1e-12)


@pytest.mark.parametrize(
    ("rounds", "warm", "gap"),
    [(1, True, 2.3e-2), (5, True, 3e-5), (20, True, 9e-7), (1, False, 0.12), (5, False, 1.7e-2), (20, False, 7e-5)],
)
def test_the_closed_loop_costs_as_much_more_as_in_the_fixture(
    mpc: SimpleNamespace, least_cost: float, rounds: int, warm: bool, gap: float
) -> None:
    assert mpc.closed_loop(mpc.Consensus(rounds, warm=warm))[2] / least_cost - 1 == pytest.approx(gap, rel=0.1)


def test_with_many_rounds_the_closed_loop_is_the_centralised_one_whoever_takes_part(
    mpc: SimpleNamespace, least_cost: float
) -> None:
    assert mpc.closed_loop(mpc.Consensus(100, size=2, seed=1))[2] == pytest.approx(least_cost, rel=1e-8)


def test_a_shift_keeps_the_servers_memory_the_mean_of_the_agents(mpc: SimpleNamespace) -> None:
    consensus = mpc.Consensus(3, size=1)
    consensus(mpc.START)
    old = {i: consensus.store[i].state for i in range(4)}
    consensus.shift()
    new = {i: consensus.store[i].state for i in range(4)}
    for i in range(4):
        for name in ("x_i", "z_i"):
            before, after = getattr(old[i], name), getattr(new[i], name)
            assert torch.equal(after[:36], before[4:])
            assert torch.equal(after[36:], before[36:])
    x_tilde = sum(new[i].x_i + new[i].z_i / 0.2 for i in range(4)) / 4
    torch.testing.assert_close(consensus.server.x_tilde, x_tilde, rtol=0, atol=1e-14)
    assert torch.equal(consensus.server.x_bar, consensus.server.x_tilde.clamp(-2, 2))


def test_the_example_draws_a_figure_and_counts_communication(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    args = ["--rounds-per-step", "3", "--agents-per-round", "2", "--steps", "4", "--out", "mpc"]
    monkeypatch.setattr(sys, "argv", ["consensus_mpc.py", *args])
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    printed = capsys.readouterr().out
    assert f"{2 * 3 * 40 * 2} scalars per time step, {2 * 3 * 40 * 2 // 4} per agent" in printed
    assert imread(tmp_path / "mpc" / "closed_loop.png").shape[:2] == (504, 1680)


@pytest.mark.parametrize("args", [["--rounds-per-step", "0"], ["--agents-per-round", "5"], ["--steps", "0"]])
def test_the_example_refuses_what_cannot_be_run(
    args: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["consensus_mpc.py", *args])
    with pytest.raises(SystemExit):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    assert "1 to 4 agents per round" in capsys.readouterr().err
