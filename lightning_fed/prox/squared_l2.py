from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Selective


@dataclass(frozen=True)
class SquaredL2(Selective):
    r""":math:`g(x) = \frac c2\|x\|^2`, whose prox divides by :math:`1 + tc`.

    >>> import torch
    >>> SquaredL2(1.0).prox(torch.tensor([3.0, -1.0]), 1.0)
    tensor([ 1.5000, -0.5000])
    """

    c: float = 1.0
    on: Patterns = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c)

    def value(self, x: Tensor) -> Tensor:
        return 0.5 * self.c * x.square().sum(-1)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return v / (1 + t * self.c)
