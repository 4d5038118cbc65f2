from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Selective
from lightning_fed.prox.elementary import soft


@dataclass(frozen=True)
class L1(Selective):
    r""":math:`g(x) = c\|x\|_1`, whose prox shrinks every entry towards 0 by :math:`tc`.

    >>> import torch
    >>> L1(1.0).prox(torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0]), 1.0)
    tensor([ 2., -0.,  0.,  0., -1.])
    """

    c: float = 1.0
    on: Patterns = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c)

    def value(self, x: Tensor) -> Tensor:
        return self.c * x.abs().sum(-1)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return soft(v, t * self.c)
