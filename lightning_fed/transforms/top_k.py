from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.validation import whole
from lightning_fed.transforms.base import Sent, Transform, dense_bits

INDEX_BITS = 32


@dataclass(frozen=True)
class TopK(Transform):
    """Send only the ``k`` entries of largest magnitude, the first of equal ones, each with its index.

    >>> TopK(1)(torch.tensor([1.0, -3.0, 3.0]), torch.Generator()).value
    tensor([ 0., -3.,  0.])
    """

    k: int

    def __post_init__(self) -> None:
        whole(self, "k", 1)

    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        if self.k >= v.shape[-1]:
            return Sent(v, dense_bits(v))
        kept = v.abs().argsort(dim=-1, descending=True, stable=True)[..., : self.k]
        value = torch.zeros_like(v).scatter(-1, kept, v.gather(-1, kept))
        return Sent(value, kept.numel() * (8 * v.element_size() + INDEX_BITS))
