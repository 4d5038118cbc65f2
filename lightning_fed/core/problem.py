"""The local problem that every algorithm asks clients to solve, and its solution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, Tensor

#: Maps a point and a step size to another point; ``g.prox`` is one.
StepMap = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, eq=False)
class Question:
    """The terms that the local problem adds to the loss: ``<linear, x> + rho/2 |x - center|^2``; None is zero."""

    linear: Tensor | None = None
    rho: float = 0.0
    center: Tensor | None = None

    @property
    def constant(self) -> Tensor | None:
        """The part of the terms' gradient that does not depend on x."""
        if not self.rho or self.center is None:
            return self.linear
        return -self.rho * self.center if self.linear is None else self.linear - self.rho * self.center

    @property
    def pull(self) -> Tensor | None:
        """The minimiser ``center - linear / rho`` of the terms; without a penalty there is none: the linear term."""
        if not self.rho or self.linear is None:
            return self.center if self.rho else self.linear
        return self.linear / -self.rho if self.center is None else self.center.sub(self.linear, alpha=1 / self.rho)

    def gradient(self, x: Tensor, slope: Tensor) -> Tensor:
        """The gradient of the local problem's objective at ``x``, where the loss has gradient ``slope``."""
        total = slope if self.linear is None else slope + self.linear
        return total + self.rho * (x if self.center is None else x - self.center) if self.rho else total


@dataclass(frozen=True, eq=False)
class LocalProblem:
    """A local problem: added terms, start, and how local steps are taken. :meth:`Local.solve` explains the fields."""

    start: Tensor
    question: Question
    after_step: StepMap | None = None
    evaluate_at: StepMap | None = None
    work: float = 1.0
    estimate: Tensor | None = None

    @property
    def is_mapped(self) -> bool:
        """Whether points are mapped between steps, so that the solution does not minimise the objective."""
        return self.after_step is not None or self.evaluate_at is not None

    @property
    def is_plain(self) -> bool:
        """Whether all local steps are unmodified gradient steps on the objective."""
        return not self.is_mapped and self.work == 1 and self.estimate is None


@dataclass(frozen=True, eq=False)
class Solution:
    """Solution of a local problem: the point ``x``, the mean loss f_i over the local steps, and their number.

    ``lr_sum`` is the sum of the step sizes, known for plain gradient steps; ``estimate`` the final estimate of the
    gradient of f_i, if the problem has one. Under a tolerance, ``residual`` is the norm of the objective's gradient
    at ``x``, and ``reached`` tells whether ``residual`` is within the tolerance. ``reach`` is the
    :class:`~lightning_fed.core.reach.Reach` of the steps, known for SGD with or without momentum.
    """

    x: Tensor
    loss: float = float("nan")
    steps: int = 0
    lr_sum: float = float("nan")
    estimate: Tensor | None = None
    residual: float = float("nan")
    reached: bool = True
    reach: float = float("nan")


class Local(ABC):
    """Solves local problems: for a module and its data, in closed form, or for a stack of clients."""

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

        First-order solvers accept more: ``after_step(x, lr)`` replaces x after every step of size lr, and gradients
        are taken at ``evaluate_at(x, elapsed)``, where ``elapsed`` is the sum of the step sizes so far. ``work`` is
        the fraction of local steps or epochs that the client does, at least one. With an ``estimate`` v of the gradient
        at ``start``, steps go along v instead of their batch's gradient, and each step updates v by the difference of
        the batch's gradients at its two ends: ``v + grad f_i(x; B) - grad f_i(x_before; B)``.
        """
        question = Question(linear, rho, center)
        return self.answer(LocalProblem(start, question, after_step, evaluate_at, work, estimate))

    @abstractmethod
    def answer(self, problem: LocalProblem) -> Solution:
        """Solve a local problem."""

    @abstractmethod
    def gradient(self, x: Tensor) -> Tensor:
        """The gradient of ``f_i`` at ``x``, over all of the client's data."""

    @abstractmethod
    def rng(self, purpose: str) -> Generator:
        """A random generator of its own for each (seed, round, client, purpose)."""
