"""The one problem that every algorithm asks clients to solve, and its solution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, Tensor

#: A point and a length, to another point; such as ``g.prox``.
StepMap = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, eq=False)
class Question:
    """What a client is asked to minimise beside its loss: ``<linear, x> + rho/2 |x - center|^2``; None is zero."""

    linear: Tensor | None = None
    rho: float = 0.0
    center: Tensor | None = None

    @property
    def constant(self) -> Tensor | None:
        """The part of its gradient that does not depend on x."""
        if not self.rho or self.center is None:
            return self.linear
        return -self.rho * self.center if self.linear is None else self.linear - self.rho * self.center

    @property
    def pull(self) -> Tensor | None:
        """The point that all of it draws x to; without a penalty there is none, and this is the linear term."""
        if not self.rho or self.linear is None:
            return self.center if self.rho else self.linear
        return self.linear / -self.rho if self.center is None else self.center.sub(self.linear, alpha=1 / self.rho)

    def gradient(self, x: Tensor, slope: Tensor) -> Tensor:
        """The gradient of the whole at ``x``, where that of the loss is ``slope``."""
        total = slope if self.linear is None else slope + self.linear
        return total + self.rho * (x if self.center is None else x - self.center) if self.rho else total


@dataclass(frozen=True, eq=False)
class LocalProblem:
    """A question, where to start, and how the steps towards its answer are taken: see :meth:`Local.solve`."""

    start: Tensor
    question: Question
    after_step: StepMap | None = None
    evaluate_at: StepMap | None = None
    work: float = 1.0
    estimate: Tensor | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether points are mapped between steps, so that the answer is no minimiser of the question."""
        return self.after_step is not None or self.evaluate_at is not None

    @property
    def is_plain(self) -> bool:
        """Whether all steps are gradient steps on the question, and nothing else."""
        return not self.is_mapped and self.work == 1 and self.estimate is None


@dataclass(frozen=True, eq=False)
class Solution:
    """Answer to the question: the point ``x``, the mean plain loss met on the way, and the steps taken.

    ``lr_sum`` is the sum of their step sizes, known where they are plain gradient steps; ``estimate`` that of the
    gradient of f_i at ``x``, where one was asked for. Under a tolerance, ``residual`` is the norm of the question's
    gradient at ``x``, and ``reached`` whether it is small enough.
    """

    x: Tensor
    loss: float = float("nan")
    steps: int = 0
    lr_sum: float = float("nan")
    estimate: Tensor | None = None
    residual: float = float("nan")
    reached: bool = True


class Local(ABC):
    """Solves the one problem that every algorithm asks: a module and its data, a closed form, a stack of clients."""

    def solve(
        self,
        start: Tensor,
        *,
        linear: Tensor | None = None,
        rho: float = 0.0,
        center: Tensor | None = None,
        after_step: StepMap | None = None,
        evaluate_at: StepMap | None = None,
        work: float = 1.0,
        estimate: Tensor | None = None,
    ) -> Solution:
        """Approximate ``argmin_x f_i(x) + <linear, x> + rho/2 |x - center|^2`` from ``start``; None counts as zero.

        First-order solvers may be asked for more: ``after_step(x, lr)`` takes the place of x after every step of
        length lr, and gradients are taken at ``evaluate_at(x, elapsed)``, with the sum of the step sizes so far.
        ``work`` is the share of its local steps or epochs that a client gets done, one at least. With an ``estimate`` v
        of the gradient at ``start``, steps are taken along v in the place of their batch's gradient, and each changes
        it by the difference of the batch's gradients at its two ends: ``v + grad f_i(x; B) - grad f_i(x_before; B)``.
        """
        question = Question(linear, rho, center)
        return self.answer(LocalProblem(start, question, after_step, evaluate_at, work, estimate))

    @abstractmethod
    def answer(self, problem: LocalProblem) -> Solution:
        """Solve a problem."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of ``f_i`` at ``x``, over all of the client's data."""

    @abstractmethod
    def rng(self, purpose: str) -> Generator:
        """A stream of its own, drawn from (seed, round, client, purpose)."""
