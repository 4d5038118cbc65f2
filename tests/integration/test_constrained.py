"""Learning under constraints as the example does it: always feasible, and optimal in the end."""

from __future__ import annotations

import runpy
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

EXAMPLE = Path(__file__).parents[2] / "examples" / "constrained.py"
EX = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))
PROBLEMS = EX.problems()
SETS = pytest.mark.parametrize("name", list(PROBLEMS))

#: by how much a point misses the definition of its set
MISSES = {
    "simplex": lambda x: max(float(-x.min()), abs(float(x.sum()) - 1)),
    "box": lambda x: float(x.abs().max()) - 0.25,
    "ball": lambda x: float(x.norm()) - 0.5,
}

#: the least value of a linear function over the set
LEAST = {
    "simplex": lambda slope: slope.min(),
    "box": lambda slope: -0.25 * slope.abs().sum(),
    "ball": lambda slope: -0.5 * slope.norm(),
}


def optimality_gap(name: str, x: Tensor) -> float:
    """An upper bound of ``f(x) - min f`` over the set, by convexity alone: no projection takes part."""
    slope = PROBLEMS[name].gradient(x)
    return float(slope @ x - LEAST[name](slope))


@SETS
@pytest.mark.parametrize("seed", range(2))
def test_the_model_is_feasible_after_every_round_and_optimal_in_the_end(name: str, seed: int) -> None:
    problem = PROBLEMS[name]
    run = problem.federated(rounds=300, seed=seed)
    assert all(len(cohort) == 3 for cohort in run.cohorts)
    assert max(MISSES[name](state.x_bar) for state in run.server[1:]) <= 1e-12
    assert problem.mapping(run.server[1].x_bar) > 1e-2
    assert problem.mapping(run.x_bar) < 1e-10
    assert optimality_gap(name, run.x_bar) < 1e-10
    torch.testing.assert_close(run.x_bar, problem.centralised(), rtol=0, atol=1e-10)


@SETS
def test_the_clients_own_models_are_feasible_only_in_the_end(name: str) -> None:
    run = PROBLEMS[name].federated(rounds=300)
    worst = [max(MISSES[name](client.x_i) for client in run.clients[k]) for k in (5, -1)]
    assert worst[0] > 1e-2
    assert worst[1] < 1e-10


@SETS
def test_the_constraint_matters(name: str) -> None:
    x = PROBLEMS[name].centralised()
    assert PROBLEMS[name].gradient(x).norm() > 1e-3
    assert abs(optimality_gap(name, x)) < 1e-12


@SETS
def test_a_prox_written_in_the_example_projects(name: str) -> None:
    g = PROBLEMS[name].algorithm.g
    v = 2 * torch.randn(50, 6, dtype=torch.float64)
    p = g.prox(v, 1.0)
    assert max(MISSES[name](row) for row in p) <= 1e-12
    assert torch.equal(p[7], g.prox(v[7], 0.1))
    towards = torch.stack([LEAST[name](p_j - v_j) - (p_j - v_j) @ p_j for p_j, v_j in zip(p, v, strict=True)])
    assert towards.abs().max() < 1e-12  # <p - v, y - p> >= 0 for every y of the set
    assert torch.equal(g(p), torch.zeros(50, dtype=torch.float64))
    assert g(p[0] + 1) == float("inf")


def test_the_weights_of_a_lightning_module_stay_in_the_box() -> None:
    largest = EX.fit(bound=0.25, rounds=5)
    assert len(largest) == 5
    assert max(largest) <= 0.25
    assert min(largest) == 0.25  # the truth is 1 everywhere


def test_the_example_prints_a_line_per_set(capsys: pytest.CaptureFixture[str]) -> None:
    EX.main()
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1:4]] == ["simplex", "box", "ball"]
    assert all(float(line.split()[1]) <= 1e-12 for line in lines[1:4])
    assert lines[-1].endswith(" 0.500" * 8)
