"""The local problems of a stack of clients, and their solutions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.problem import LocalProblem, Question
from lightning_fed.local.stacked.log import StepLog
from lightning_fed.local.stacked.pure_step import UnfitError


@dataclass(frozen=True, eq=False)
class StackedProblem:
    """The problems of a stack: starts and constant gradients (m, d), and the problems themselves if any maps steps."""

    start: Tensor
    constant: Tensor | None
    rho: float
    mapped: Sequence[LocalProblem] = ()

    @classmethod
    def of(cls, problems: Sequence[LocalProblem]) -> StackedProblem:
        questions = [problem.question for problem in problems]
        rho = questions[0].rho
        if any(question.rho != rho for question in questions):
            raise UnfitError("clients of one round have different penalties")
        linear, center = _stacked([q.linear for q in questions]), _stacked([q.center for q in questions])
        mapped = problems if any(problem.is_mapped for problem in problems) else ()
        start = torch.stack([problem.start for problem in problems])
        return cls(start, Question(linear, rho, center).constant, rho, mapped)

    def of_some(self, clients: list[int]) -> StackedProblem:
        """Select the problems of some clients."""
        constant = None if self.constant is None else self.constant[clients]
        return StackedProblem(self.start[clients], constant, self.rho, [self.mapped[i] for i in clients if self.mapped])


def _stacked(rows: Sequence[Tensor | None]) -> Tensor | None:
    """Stack rows (m, d), with zeros for clients that have none; None if no client has one."""
    given = [row for row in rows if row is not None]
    return torch.stack([torch.zeros_like(given[0]) if row is None else row for row in rows]) if given else None


@dataclass(frozen=True, eq=False)
class Answers:
    """The solutions (m, d) of a stack, the clients' mean losses, step size and momentum, and the log of their steps."""

    x: Tensor
    losses: list[float]
    lr: float
    momentum: float
    log: StepLog
