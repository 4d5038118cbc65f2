from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Scope, Selective
from lightning_fed.prox.elementary import onto_l1_ball


@dataclass(frozen=True)
class LInf(Selective):
    r""":math:`g(x) = c\max_j|x_j|`, whose prox is :math:`v - \Pi(v)` with the 1-norm ball of radius :math:`tc`.

    >>> import torch
    >>> LInf(1.0).prox(torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0]), 2.5)
    tensor([ 1.2500, -1.0000,  0.5000,  0.0000, -1.2500])
    """

    c: float = 1.0
    on: Patterns = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c)

    def value(self, x: Tensor) -> Tensor:
        return self.c * x.abs().amax(-1)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return v - onto_l1_ball(v, t * self.c)
