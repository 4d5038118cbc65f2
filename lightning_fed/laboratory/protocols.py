"""What a client of the laboratory, and a solver of its local problem, have to be."""

from __future__ import annotations

from typing import Protocol

from torch import Tensor

from lightning_fed.core.problem import Solution


class Loss(Protocol):
    """A client of :func:`~lightning_fed.simulate`: a loss with a gradient, and a number of samples.

    >>> import torch
    >>> from lightning_fed.laboratory import GradientDescent
    >>> class Cosine:  # any object of this kind will do; Exact solves Quadratic alone
    ...     num_examples = 1
    ...
    ...     def __call__(self, x):
    ...         return -x.cos().sum()
    ...
    ...     def grad(self, x):
    ...         return x.sin()
    >>> found = GradientDescent(steps=50, lr=0.5)(Cosine(), torch.ones(1), torch.zeros(1), 0.0, torch.zeros(1))
    >>> bool(found.x.abs() < 1e-6)  # the minimum at 0
    True
    """

    num_examples: int

    def __call__(self, x: Tensor) -> Tensor: ...

    def grad(self, x: Tensor) -> Tensor:
        """The gradient at ``x``."""
        ...


class Solver(Protocol):
    """Solves a local problem for a given loss: :class:`~lightning_fed.Exact`, :class:`~lightning_fed.GradientDescent`.

    >>> import torch
    >>> from lightning_fed.laboratory import Quadratic
    >>> def half_way(f, start, linear, rho, center):  # one step, with the penalty of the question
    ...     x = start - 0.5 * (f.grad(start) + linear + rho * (start - center))
    ...     return Solution(x=x, lr_sum=0.5, loss=f(start), steps=1)
    >>> zero = torch.zeros(1, dtype=torch.float64)
    >>> half_way(Quadratic.scalar(1.0, 2.0), zero, zero, 0.0, zero).x
    tensor([1.], dtype=torch.float64)
    """

    def __call__(self, f: Loss, start: Tensor, linear: Tensor, rho: float, center: Tensor) -> Solution: ...
