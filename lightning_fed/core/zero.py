from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.selective import Selective


@dataclass(frozen=True)
class Zero(Selective):
    r""":math:`g(x) = 0`, whose prox is the identity.

    >>> import torch
    >>> Zero().prox(torch.tensor([3.0, -1.0]), 1.0)
    tensor([ 3., -1.])
    """

    def value(self, x: Tensor) -> Tensor:
        return x.new_zeros(x.shape[:-1])

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return v
