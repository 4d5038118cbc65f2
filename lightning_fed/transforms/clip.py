from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.arguments import positive
from lightning_fed.transforms.base import Sent, Transform, dense_bits


@dataclass(frozen=True)
class Clip(Transform):
    r"""Shorten to :math:`\|v\| \le r`; leave shorter vectors alone.

    >>> Clip(1.0)(torch.tensor([3.0, 4.0]), torch.Generator()).value
    tensor([0.6000, 0.8000])
    """

    norm: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "norm", "It is the largest length that is let through.")

    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        length = float(v.norm())
        return Sent(v * (self.norm / length) if length > self.norm else v, dense_bits(v))
