from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Scope, Selective
from lightning_fed.prox.elementary import length, shorten


@dataclass(frozen=True)
class L2(Selective):
    r""":math:`g(x) = c\|x\|_2`, not squared: its prox makes the vector shorter by :math:`tc`, or 0.

    >>> import torch
    >>> L2(1.0).prox(torch.tensor([3.0, 4.0]), 2.5)
    tensor([1.5000, 2.0000])
    """

    c: float = 1.0
    on: Patterns = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c)

    def value(self, x: Tensor) -> Tensor:
        return self.c * length(x)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return shorten(v, t * self.c)
