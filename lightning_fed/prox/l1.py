from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.prox.base import Prox, check_strength


@dataclass(frozen=True)
class L1(Prox):
    r""":math:`g(x) = c\|x\|_1`, whose prox shrinks every entry towards 0 by :math:`tc`.

    >>> import torch
    >>> L1(1.0).prox(torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0]), 1.0)
    tensor([ 2., -0.,  0.,  0., -1.])
    """

    c: float = 1.0

    def __post_init__(self) -> None:
        check_strength(self, self.c)

    def __call__(self, x: Tensor) -> Tensor:
        return self.c * x.abs().sum(-1)

    def prox(self, v: Tensor, t: float) -> Tensor:
        return v.sign() * (v.abs() - t * self.c).clamp(min=0)
