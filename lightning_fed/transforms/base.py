from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor
from typing_extensions import Self

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


@dataclass(frozen=True, eq=False)
class Sent:
    """The vector that the receiver decodes, and the number of bits sent.

    >>> from lightning_fed.transforms import TopK
    >>> sent = TopK(1)(torch.tensor([1.0, -3.0]), torch.Generator())
    >>> sent.value.tolist(), sent.bits  # one float of 32 bits and its index
    ([0.0, -3.0], 64)
    """

    value: Tensor
    bits: int


class Transform(ABC):
    """Maps a vector that a client sends to the vector that the server receives.

    A new transform defines ``__call__``; one that is random also bounds its ``noise``:

    >>> class Signs(Transform):  # one bit per entry, and no length
    ...     def __call__(self, v, rng):
    ...         return Sent(v.sign(), v.numel())
    >>> Signs()(torch.tensor([0.5, -3.0]), torch.Generator())
    Sent(value=tensor([ 1., -1.]), bits=2)
    """

    def bind(self, layout: Layout) -> Self:
        """Return the same transform (equal, with the same repr), bound to where parameters lie in the vector."""
        return self

    def noise(self, d: int) -> float:
        """Bound on the variance of the received vector of d entries, relative to its squared norm; 0 if not random."""
        return 0.0

    @abstractmethod
    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        """Encode ``v`` with random numbers from ``rng``; does not modify ``v``."""


@dataclass(frozen=True)
class Compose(Transform):
    """Apply transforms one after another; the last one decides how many bits are sent.

    >>> from lightning_fed.transforms import Clip, TopK
    >>> Compose([Clip(1.0), TopK(1)])(torch.tensor([3.0, 4.0]), torch.Generator()).value
    tensor([0.0000, 0.8000])
    """

    transforms: Sequence[Transform]

    def __post_init__(self) -> None:
        if not isinstance(self.transforms, Sequence):
            raise TypeError(f"Compose.transforms must be a list of Transforms, got {self.transforms!r}.")
        for transform in self.transforms:
            if not isinstance(transform, Transform):
                raise TypeError(f"Compose.transforms must be Transforms such as Clip(1.0), got {transform!r}.")
        if not self.transforms:
            raise ValueError("Compose.transforms must hold at least one transform, got none.")
        object.__setattr__(self, "transforms", tuple(self.transforms))

    def bind(self, layout: Layout) -> Compose:
        return replace(self, transforms=[transform.bind(layout) for transform in self.transforms])

    def noise(self, d: int) -> float:
        return max(transform.noise(d) for transform in self.transforms)

    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        sent = Sent(v, 0)
        for transform in self.transforms:
            sent = transform(sent.value, rng)
        return sent


def dense_bits(v: Tensor) -> int:
    """Number of bits of a vector sent without compression."""
    return v.numel() * v.element_size() * 8
