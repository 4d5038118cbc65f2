"""Choose and check the solvers of a simulation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.laboratory.protocols import Solver
from lightning_fed.laboratory.quadratic import Exact, GradientDescent


def solvers_for(
    algorithm: Algorithm[Any, Any, Any], solver: Solver | Sequence[Solver] | None, n: int
) -> Sequence[Solver]:
    """One solver per client."""
    solvers = [solver or Exact()] * n if not isinstance(solver, Sequence) else solver
    if len(solvers) != n:
        raise ValueError(f"simulate got {len(solvers)} solvers for {n} clients. Give one, or one for each.")
    _check_solvers(algorithm, solvers)
    return solvers


def _check_solvers(algorithm: Algorithm[Any, Any, Any], solvers: Sequence[Solver]) -> None:
    steps = [solver for solver in solvers if isinstance(solver, GradientDescent)]
    if algorithm.traits.plain_sgd and any(solver.momentum for solver in steps):
        raise ValueError(
            f"{type(algorithm).__name__} needs plain gradient steps; omit momentum=. ({algorithm.traits.plain_sgd})"
        )
    if algorithm.traits.plain_sgd and any(solver.until is not None for solver in steps):
        raise ValueError(
            f"{type(algorithm).__name__} asks for steps, not for a minimiser, so a tolerance has no meaning."
            f" Omit until=. ({algorithm.traits.plain_sgd})"
        )


def planned_lr_sum(solvers: Sequence[Solver], weights: Sequence[float]) -> float:
    """The planned sum of step sizes of a visit, as the weighted mean over clients; nan without plain gradient steps."""
    planned = [s.steps * s.lr if isinstance(s, GradientDescent) and not s.momentum else math.nan for s in solvers]
    if len(set(planned)) == 1:
        return planned[0]  # not rounded by taking a mean
    return sum(w * length for w, length in zip(weights, planned, strict=True)) / sum(weights)
