from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.selective import ConvexSet, Patterns


@dataclass(frozen=True)
class NonNegative(ConvexSet):
    r"""Constraint :math:`x_j \ge 0` for every entry.

    >>> NonNegative().prox(torch.tensor([3.0, -1.0, 0.5]), 1.0)
    tensor([3.0000, 0.0000, 0.5000])
    """

    on: Patterns = None

    def value(self, x: Tensor) -> Tensor:
        return torch.where((x >= 0).all(-1), 0.0, float("inf")).to(x.dtype)

    def project(self, v: Tensor) -> Tensor:
        return v.clamp(min=0)
