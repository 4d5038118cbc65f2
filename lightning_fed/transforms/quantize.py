from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.arguments import whole
from lightning_fed.transforms.base import Sent, Transform

NORM_BITS = 32


@dataclass(frozen=True)
class Quantize(Transform):
    r"""Unbiased stochastic quantisation: the norm, and for every entry a sign and one of ``levels`` + 1 levels.

    .. math::
        Q(v)_j = \|v\|\,\mathrm{sign}(v_j)\,\xi_j, \quad
        \xi_j = \begin{cases}(l+1)/s & \text{with probability } a - l\\ l/s & \text{else}\end{cases}, \quad
        a = s|v_j|/\|v\|,\; l = \lfloor a\rfloor

    :math:`E\,Q(v) = v` and :math:`E\|Q(v) - v\|^2 \le \min(d/s^2, \sqrt d/s)\|v\|^2`.

    >>> Quantize(4)(torch.tensor([3.0, 0.0, -4.0]), torch.Generator().manual_seed(0)).bits
    44

    Reference: arXiv:1610.02132.
    """

    levels: int = 16

    def __post_init__(self) -> None:
        whole(self, "levels", 1)

    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        bits = NORM_BITS + v.numel() * (1 + math.ceil(math.log2(self.levels + 1)))
        norm = v.norm()
        if not float(norm):
            return Sent(v, bits)
        scaled = v.abs() * (self.levels / norm)
        low = scaled.floor()
        coins = torch.rand(v.shape, generator=rng, dtype=torch.float64).to(v.device)
        return Sent(norm * v.sign() * (low + (coins < scaled - low)) / self.levels, bits)
