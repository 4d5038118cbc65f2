from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from lightning_fed.core.prox import WithTensors, float64
from lightning_fed.core.selective import ConvexSet, Patterns


@dataclass(frozen=True, eq=False)
class Affine(WithTensors, ConvexSet):
    r"""Constraint :math:`Ax = b`; its prox is :math:`v - A^+(Av - b)`. Rows of :math:`A` may depend on each other.

    >>> Affine([[1.0, 1.0]], [1.0]).prox(torch.tensor([3.0, 0.0]), 1.0)
    tensor([ 2., -1.])
    """

    A: Tensor | Sequence[Sequence[float]]
    b: Tensor | Sequence[float]
    on: Patterns = None

    def __post_init__(self) -> None:
        super().__post_init__()
        A, b = float64(self.A), float64(self.b)
        if A.ndim != 2 or b.shape != A.shape[:1]:
            raise ValueError(
                f"Affine needs A of shape (k, d) and b of shape (k,), got {tuple(A.shape)} and {tuple(b.shape)}."
            )
        if not (A.isfinite().all() and b.isfinite().all()):
            raise ValueError("Affine.A and Affine.b must be finite; got inf or NaN.")
        object.__setattr__(self, "A", A)
        object.__setattr__(self, "b", b)
        if (A @ self._inverse @ b - b).norm() > 1e-8 * b.norm():
            raise ValueError("Affine: no x satisfies A x = b, the equations contradict each other. Check b.")

    def project(self, v: Tensor) -> Tensor:
        A, b = (value.to(v) for value in self._equations())
        if v.shape[-1] != A.shape[1]:
            raise ValueError(f"Affine.A has {A.shape[1]} columns, but there are {v.shape[-1]} entries to constrain.")
        return v - (v @ A.T - b) @ self._inverse.to(v).T

    def _equations(self) -> tuple[Tensor, Tensor]:
        return torch.as_tensor(self.A), torch.as_tensor(self.b)

    @cached_property
    def _inverse(self) -> Tensor:
        inverse: Tensor = torch.linalg.pinv(self._equations()[0], rtol=1e-12)
        return inverse
