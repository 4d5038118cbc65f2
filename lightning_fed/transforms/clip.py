from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.validation import positive
from lightning_fed.transforms.base import Sent, Transform, dense_bits


@dataclass(frozen=True)
class Clip(Transform):
    r"""Scale vectors down to :math:`\|v\| \le r`; keep shorter vectors, and send zeros for a vector that is not finite.

    The norm of the sent vector, taken in float64, never exceeds the limit, whatever the precision of the vector.

    >>> Clip(1.0)(torch.tensor([3.0, 4.0]), torch.Generator()).value
    tensor([0.6000, 0.8000])
    >>> Clip(1.0)(torch.tensor([3.0, float("nan")]), torch.Generator()).value
    tensor([0., 0.])
    """

    norm: float = 1.0

    def __post_init__(self) -> None:
        positive(self, "norm", "It is the largest norm of a sent vector.")

    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        value = v if bool(torch.isfinite(v).all()) else torch.zeros_like(v)
        if length_of(value) > self.norm:
            largest = float(value.double().abs().max())
            direction = value.double() / largest  # the norm of this cannot overflow
            factor = self.norm / length_of(direction)
            value = (direction * factor).to(v.dtype)
            while length_of(value) > self.norm:  # rounding to v.dtype may have made the vector longer
                factor *= 1 - torch.finfo(v.dtype).eps
                value = (direction * factor).to(v.dtype)
        assert length_of(value) <= self.norm
        return Sent(value, dense_bits(v))


def length_of(v: Tensor) -> float:
    """The norm in float64; infinite if it overflows there."""
    length = float(v.double().norm())
    return length if length == length else math.inf
