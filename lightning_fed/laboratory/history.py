"""What ``simulate`` keeps of a run."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fed.core.problem import Solution


@dataclass(eq=False)
class History:
    """States after each round: ``server[k]`` and ``clients[k][i]``; index 0 is the start.

    ``answers[k]`` holds the solvers' results of round k, by client: steps, and exactness if there is a tolerance.

    >>> from lightning_fed import Quadratic, simulate
    >>> from lightning_fed.algorithms import FedAvg
    >>> history = simulate(FedAvg(), [Quadratic.scalar(1.0, 1.0), Quadratic.scalar(1.0, 3.0)], rounds=2)
    >>> len(history), len(history.server), history.cohorts
    (2, 3, [[0, 1], [0, 1]])
    >>> [float(state.x_bar) for state in history.server]
    [0.0, 2.0, 2.0]
    """

    server: list[Any] = field(default_factory=list)
    clients: list[list[Any]] = field(default_factory=list)
    cohorts: list[list[int]] = field(default_factory=list)
    answers: list[dict[int, Solution]] = field(default_factory=list)

    @property
    def x_bar(self) -> Tensor:
        """The final model."""
        x: Tensor = self.server[-1].x_bar
        return x

    def __len__(self) -> int:
        """The number of rounds."""
        return len(self.cohorts)
