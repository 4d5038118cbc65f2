"""Clients whose loss is known in closed form, for tests, docs and theory."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Generator, Tensor

from lightning_fed.core.problem import Local, LocalProblem, Question, Solution
from lightning_fed.core.randomness import torch_generator
from lightning_fed.core.reach import Reach
from lightning_fed.core.validation import below_one, is_whole, whole
from lightning_fed.laboratory.protocols import Loss, Solver
from lightning_fed.theory.tolerance import Tolerance, as_tolerance


class Quadratic:
    r""":math:`f(x) = \tfrac12 x^\top A x - b^\top x`, with :math:`A` symmetric, not necessarily positive.

    Numbers and lists become float64; tensors keep their precision.

    >>> f = Quadratic([[2.0, 0.0], [0.0, 1.0]], [2.0, 3.0])
    >>> f.grad(torch.tensor([1.0, 3.0], dtype=torch.float64))
    tensor([0., 0.], dtype=torch.float64)
    """

    def __init__(self, A: Tensor | Sequence[Sequence[float]], b: Tensor | Sequence[float], num_examples: int = 1):
        self.A, self.b = _matrix(A), _matrix(b)
        self.num_examples = num_examples
        d = self.b.numel()
        if self.b.ndim != 1 or self.A.shape != (d, d):
            raise ValueError(
                f"Quadratic needs A of shape (d, d) and b of shape (d,); got {self.A.shape}, {self.b.shape}."
            )
        if not torch.allclose(self.A, self.A.T):
            raise ValueError("Quadratic needs a symmetric A. Use (A + A.T) / 2, which gives the same function.")
        whole(self, "num_examples", 1)

    @classmethod
    def scalar(cls, a: float, b: float, num_examples: int = 1) -> Quadratic:
        r""":math:`\tfrac a2 x^2 - b x` in one dimension."""
        return cls([[a]], [b], num_examples)

    def __call__(self, x: Tensor) -> Tensor:
        return 0.5 * x @ self.A.to(x) @ x - self.b.to(x) @ x

    def grad(self, x: Tensor) -> Tensor:
        """The gradient :math:`Ax - b`."""
        return self.A.to(x) @ x - self.b.to(x)


class FiniteSum(Quadratic):
    """The mean of quadratics, one per sample, of which a solver may take batches.

    >>> f = FiniteSum([Quadratic.scalar(1.0, 1.0), Quadratic.scalar(3.0, 1.0)])
    >>> f.num_examples, f.A.item(), f.batch(torch.tensor([1])).A.item()
    (2, 2.0, 3.0)
    """

    def __init__(self, samples: Sequence[Quadratic]) -> None:
        if not samples or not all(isinstance(f, Quadratic) for f in samples):
            raise TypeError(f"FiniteSum is made of one Quadratic or more, got {samples!r}.")
        self._A, self._b = torch.stack([f.A for f in samples]), torch.stack([f.b for f in samples])
        super().__init__(self._A.mean(0), self._b.mean(0), len(samples))

    def batch(self, members: Tensor) -> Quadratic:
        """The mean over some of the samples."""
        return Quadratic(self._A[members].mean(0), self._b[members].mean(0), len(members))


def _matrix(value: Tensor | Sequence[Sequence[float]] | Sequence[float]) -> Tensor:
    if isinstance(value, Tensor) and value.is_floating_point():
        return value
    return torch.as_tensor(value, dtype=torch.float64)


@dataclass(frozen=True)
class Exact:
    """The exact minimiser, for quadratics: solves ``(A + rho I) x = b - linear + rho center``.

    >>> zero, one = torch.zeros(1, dtype=torch.float64), torch.ones(1, dtype=torch.float64)
    >>> found = Exact()(Quadratic.scalar(1.0, 3.0), start=zero, linear=zero, rho=1.0, center=one)
    >>> round(float(found.x), 6)  # (3 + 1) / (1 + 1)
    2.0
    """

    def __call__(self, f: Loss, start: Tensor, linear: Tensor, rho: float, center: Tensor) -> Solution:
        if not isinstance(f, Quadratic):
            raise TypeError(f"Exact solves Quadratic clients only, got {type(f).__name__}. Use GradientDescent.")
        A = f.A.to(start) + rho * torch.eye(start.numel(), dtype=start.dtype, device=start.device)
        factor, info = torch.linalg.cholesky_ex(A)
        if info:
            raise ValueError(
                f"The local problem has no unique minimiser: A + {rho:g} I is not positive definite."
                " Use a penalty above the largest negative curvature, or GradientDescent."
            )
        right = f.b.to(start) - linear + rho * center
        x = torch.cholesky_solve(right.unsqueeze(-1), factor).squeeze(-1)
        return Solution(x, loss=float(f(x)), steps=1)


@dataclass(frozen=True)
class GradientDescent:
    """``steps`` gradient steps of length ``lr``: full ones, or on batches of a :class:`FiniteSum`.

    Args:
        steps: number of steps; with ``until``, the most.
        lr: length of a step.
        until: a :class:`~lightning_fed.theory.Tolerance`, or a number that the norm of the local problem's gradient
            must not exceed. If the start is good enough, it is the solution, without a step.
        batch_size: number of samples in a batch; all of them if None.
        momentum: of the steps, in [0, 1), from rest in every visit; algorithms that need plain steps refuse it.

    >>> f = Quadratic.scalar(1.0, 3.0)
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> found = GradientDescent(steps=100, lr=0.5, until=0.01)(f, zero, zero, 1.0, zero)  # x^2 - 3x
    >>> found.steps, found.reached, float(found.x)
    (1, True, 1.5)
    """

    steps: int
    lr: float
    until: Tolerance | float | None = None
    batch_size: int | None = None
    momentum: float = 0.0

    def __post_init__(self) -> None:
        whole(self, "batch_size", 1, optional=True)
        below_one(self, "momentum", "0 for plain gradient steps.")
        if not is_whole(self.steps) or self.steps < 1 or not 0 < self.lr < float("inf"):
            raise ValueError(f"GradientDescent needs steps >= 1 and lr > 0, got steps={self.steps!r}, lr={self.lr!r}.")
        if self.until is not None:
            object.__setattr__(self, "until", as_tolerance(self.until))
            if self.momentum:
                raise ValueError(f"GradientDescent(until=...) takes plain steps, got momentum={self.momentum:g}.")

    def __call__(self, f: Loss, start: Tensor, linear: Tensor, rho: float, center: Tensor) -> Solution:
        return self.solve(f, LocalProblem(start, Question(linear, rho, center)))

    def solve(self, f: Loss, problem: LocalProblem, rng: Generator | None = None, round: int = 0) -> Solution:
        """Solve any local problem; ``rng`` draws batches."""
        steps = max(1, int(problem.work * self.steps))
        if isinstance(self.until, Tolerance):
            if problem.is_mapped or problem.estimate is not None or self.batch_size is not None:
                raise ValueError(
                    "GradientDescent(until=...) needs full gradients, and an algorithm that asks for a minimiser."
                )
            return self._until(self.until, f, problem.question, problem.start, steps, round)
        question, x, v, losses = problem.question, problem.start, problem.estimate, []
        velocity = torch.zeros_like(x)
        for k in range(steps):
            part = self._batch(f, rng)
            at = x if problem.evaluate_at is None else problem.evaluate_at(x, k * self.lr)
            losses.append(float(part(at)))
            slope = part.grad(at)
            direction = question.gradient(x, slope if v is None else v)
            velocity = self.momentum * velocity + direction if self.momentum else direction
            x = x - self.lr * velocity
            x = x if problem.after_step is None else problem.after_step(x, self.lr)
            v = None if v is None else v + part.grad(x) - slope
        reach = Reach.of(steps, self.lr, self.momentum, question.rho)
        return Solution(x, sum(losses) / steps, steps, lr_sum=steps * self.lr, estimate=v, reach=reach)

    def _batch(self, f: Loss, rng: Generator | None) -> Loss:
        if self.batch_size is None:
            return f
        if not isinstance(f, FiniteSum) or self.batch_size > f.num_examples:
            raise ValueError(
                f"GradientDescent(batch_size={self.batch_size}) needs clients that are a FiniteSum of as many samples,"
                f" got {type(f).__name__} of {f.num_examples}."
            )
        return f.batch(torch.randperm(f.num_examples, generator=rng)[: self.batch_size])

    def _until(
        self, tolerance: Tolerance, f: Loss, question: Question, start: Tensor, steps: int, round: int
    ) -> Solution:
        x, losses = start, list[float]()
        gradient = question.gradient(x, f.grad(x))
        limit = tolerance.limit(round, question.rho, float(gradient.norm()))
        while gradient.norm() > limit and len(losses) < steps:
            losses.append(float(f(x)))
            x = x - self.lr * gradient
            gradient = question.gradient(x, f.grad(x))
        loss = sum(losses) / len(losses) if losses else float("nan")
        residual = float(gradient.norm())
        reach = Reach.of(len(losses), self.lr, rho=question.rho)
        return Solution(
            x, loss, len(losses), len(losses) * self.lr, residual=residual, reached=residual <= limit, reach=reach
        )


@dataclass(frozen=True, eq=False)
class Oracle(Local):
    """A loss and a solver, which solve the local problems of one client."""

    f: Loss
    solver: Solver
    key: tuple[int | str, ...] = ()  # seeds the draws
    round: int = 0
    answers: list[Solution] = field(default_factory=list)

    def answer(self, problem: LocalProblem) -> Solution:
        question, zero = problem.question, torch.zeros_like(problem.start)
        linear = zero if question.linear is None else question.linear
        center = zero if question.center is None else question.center
        if isinstance(self.solver, GradientDescent):
            filled = replace(problem, question=Question(linear, question.rho, center))
            self.answers.append(self.solver.solve(self.f, filled, self.rng("batches"), self.round))
        elif problem.is_plain:
            self.answers.append(self.solver(self.f, problem.start, linear, question.rho, center))
        else:
            raise TypeError(f"This algorithm works step by step; use GradientDescent, not {self.solver!r}.")
        return self.answers[-1]

    def gradient(self, x: Tensor) -> Tensor:
        return self.f.grad(x)

    def rng(self, purpose: str) -> torch.Generator:
        return torch_generator(*self.key, purpose)
