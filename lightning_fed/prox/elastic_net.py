from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Selective
from lightning_fed.prox.elementary import soft


@dataclass(frozen=True)
class ElasticNet(Selective):
    r""":math:`g(x) = c_1\|x\|_1 + \frac{c_2}2\|x\|^2`: the prox of the first, divided by :math:`1 + tc_2`.

    >>> import torch
    >>> ElasticNet(0.5, 1.0).prox(torch.tensor([3.0, -1.0, 0.5]), 1.0)
    tensor([ 1.2500, -0.2500,  0.0000])
    """

    c1: float = 1.0
    c2: float = 1.0
    on: Patterns = None

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c1, "c1")
        check_strength(self, self.c2, "c2")

    def value(self, x: Tensor) -> Tensor:
        return self.c1 * x.abs().sum(-1) + 0.5 * self.c2 * x.square().sum(-1)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return soft(v, t * self.c1) / (1 + t * self.c2)
