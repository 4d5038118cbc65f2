from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.prox.base import Prox, check_strength


@dataclass(frozen=True)
class SquaredL2(Prox):
    r""":math:`g(x) = \frac c2\|x\|^2`, whose prox divides by :math:`1 + tc`.

    >>> import torch
    >>> SquaredL2(1.0).prox(torch.tensor([3.0, -1.0]), 1.0)
    tensor([ 1.5000, -0.5000])
    """

    c: float = 1.0

    def __post_init__(self) -> None:
        check_strength(self, self.c)

    def __call__(self, x: Tensor) -> Tensor:
        return 0.5 * self.c * x.square().sum(-1)

    def prox(self, v: Tensor, t: float) -> Tensor:
        return v / (1 + t * self.c)
