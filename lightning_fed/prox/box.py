from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.selective import ConvexSet, Patterns
from lightning_fed.core.validation import is_number


@dataclass(frozen=True)
class Box(ConvexSet):
    r"""Constraint :math:`lo \le x_j \le hi` for every entry; its prox clips.

    >>> Box(-1.0, 1.0).prox(torch.tensor([3.0, -1.0, 0.5]), 1.0)
    tensor([ 1.0000, -1.0000,  0.5000])
    """

    lo: float = 0.0
    hi: float = 1.0
    on: Patterns = None

    def __post_init__(self) -> None:
        super().__post_init__()
        numbers = is_number(self.lo) and is_number(self.hi)
        if not numbers or not self.lo <= self.hi or self.lo == float("inf") or self.hi == -float("inf"):
            raise ValueError(f"Box needs lo <= hi, got lo={self.lo!r}, hi={self.hi!r}.")

    def value(self, x: Tensor) -> Tensor:
        inside = ((x >= self.lo) & (x <= self.hi)).all(-1)  # clipping is exact: bounds are rounded as x is
        return torch.where(inside, 0.0, float("inf")).to(x.dtype)

    def project(self, v: Tensor) -> Tensor:
        return v.clamp(self.lo, self.hi)
