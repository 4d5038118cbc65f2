"""What the clients of a stack are asked together, and what they answer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.problem import LocalProblem, Question
from lightning_fed.local.stacked.log import StepLog
from lightning_fed.local.stacked.pure_step import UnfitError


@dataclass(frozen=True, eq=False)
class Questions:
    """What the clients of a stack are asked: starts and constants (m, d), and maps of their own, if they have any."""

    start: Tensor
    constant: Tensor | None
    rho: float
    mapped: Sequence[LocalProblem] = ()

    @classmethod
    def of(cls, asked: Sequence[LocalProblem]) -> Questions:
        rho = asked[0].question.rho
        if any(each.question.rho != rho for each in asked):
            raise UnfitError("clients of one round have different penalties")
        constants = [each.question.constant for each in asked]
        constant = None
        if any(c is not None for c in constants):
            zero = torch.zeros_like(asked[0].start)
            constant = torch.stack([zero if c is None else c for c in constants])
        mapped = any(each.is_mapped for each in asked)
        return cls(torch.stack([each.start for each in asked]), constant, rho, asked if mapped else ())

    def of_some(self, clients: list[int]) -> Questions:
        """Those of some clients."""
        constant = None if self.constant is None else self.constant[clients]
        return Questions(self.start[clients], constant, self.rho, [self.mapped[i] for i in clients if self.mapped])

    def __getitem__(self, i: int) -> Question:
        """One of them, up to a constant."""
        return Question(None if self.constant is None else self.constant[i], self.rho)


@dataclass(frozen=True, eq=False)
class Answers:
    """Where the clients of a stack ended, (m, d), their mean losses, and what they logged."""

    questions: Questions
    x: Tensor
    losses: list[float]
    lr: float
    log: StepLog
