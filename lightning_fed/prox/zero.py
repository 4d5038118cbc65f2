from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.prox.base import Prox


@dataclass(frozen=True)
class Zero(Prox):
    r""":math:`g(x) = 0`, whose prox is the identity."""

    def __call__(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])

    def prox(self, v: Tensor, t: float) -> Tensor:
        return v
