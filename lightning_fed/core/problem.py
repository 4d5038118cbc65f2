"""The local problem that every algorithm asks clients to solve, and its solution."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from torch import Generator, Tensor

StepMap = Callable[[Tensor, float], Tensor]
"""A function of a point and a step size that returns another point, such as the ``prox`` of a ``g``.

>>> import torch
>>> from lightning_fed.core import StepMap
>>> from lightning_fed.prox import L1
>>> shrink: StepMap = L1(1.0).prox
>>> shrink(torch.tensor([3.0, 0.2]), 0.5).tolist()
[2.5, 0.0]
"""


@dataclass(frozen=True, eq=False)
class Question:
    r"""The terms that a local problem adds to the loss of the client; None counts as zero.

    .. math::
        \langle l, x\rangle + \tfrac\rho2\|x - c\|^2

    Args:
        linear: the vector :math:`l`.
        rho: the penalty :math:`\rho`, >= 0.
        center: the point :math:`c`.

    >>> import torch
    >>> question = Question(linear=torch.tensor([1.0]), rho=2.0, center=torch.tensor([3.0]))
    >>> question.pull  # their minimiser, c - l / rho
    tensor([2.5000])
    >>> question.gradient(torch.tensor([4.0]), slope=torch.tensor([10.0]))  # 10 + 1 + 2 * (4 - 3)
    tensor([13.])
    """

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
    """A local problem: added terms, start, and how local steps are taken. :meth:`Local.solve` explains the fields.

    >>> import torch
    >>> from lightning_fed.prox import L1
    >>> plain = LocalProblem(torch.zeros(2), Question(rho=1.0, center=torch.ones(2)))
    >>> mapped = LocalProblem(torch.zeros(2), Question(), after_step=L1(0.1).prox)  # FedMid's steps
    >>> plain.is_plain, mapped.is_plain, mapped.is_mapped
    (True, False, True)
    """

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

    >>> import torch
    >>> from lightning_fed.laboratory import GradientDescent, Quadratic
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> found = GradientDescent(steps=2, lr=0.5)(Quadratic.scalar(1.0, 3.0), zero, zero, 0.0, zero)  # 0, 1.5, 2.25
    >>> float(found.x), found.steps, found.lr_sum
    (2.25, 2, 1.0)
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
    r"""Solves local problems: for a module and its data, in closed form, or for a stack of clients.

    .. math::
        x \approx \arg\min_x f_i(x) + \langle l, x\rangle + \tfrac\rho2\|x - c\|^2

    Every algorithm asks its clients this question, with its own :math:`l`, :math:`\rho` and :math:`c`. Algorithms call
    :meth:`solve`, :meth:`gradient` and :meth:`rng`; they never see data or a module.

    >>> import torch
    >>> from lightning_fed.laboratory.quadratic import Exact, Oracle, Quadratic
    >>> local = Oracle(Quadratic.scalar(1.0, 3.0), Exact())  # f(x) = x^2 / 2 - 3 x
    >>> x = torch.tensor([5.0], dtype=torch.float64)
    >>> float(local.gradient(x))
    2.0
    >>> round(float(local.solve(x, rho=1.0, center=x).x), 6)  # (3 + 5) / (1 + 1)
    4.0
    """

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
