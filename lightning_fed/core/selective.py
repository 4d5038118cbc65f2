"""A ``g`` that acts only on chosen parameters of a module."""

from __future__ import annotations

import copy
import math
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
from torch import Tensor

from lightning_fed.core.patterns import check_patterns, matching
from lightning_fed.core.prox import Prox, needs_layout, outside
from lightning_fed.core.validation import one_of

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout

Patterns = str | Sequence[str] | None
Scope = Literal["global", "per_tensor"]
Self = TypeVar("Self", bound="Selective")


@dataclass(frozen=True)
class Block:
    """A part of the flat vector that ``g`` sees as one array of ``shape``."""

    slices: tuple[slice, ...]
    shape: tuple[int, ...]

    def take(self, x: Tensor) -> Tensor:
        return torch.cat([x[..., s] for s in self.slices], -1).reshape(*x.shape[:-1], *self.shape)

    def put(self, block: Tensor, x: Tensor) -> None:
        parts = torch.split(block.flatten(-len(self.shape)), [s.stop - s.start for s in self.slices], -1)
        for s, part in zip(self.slices, parts, strict=True):
            x[..., s] = part


class Selective(Prox):
    """A ``g`` of the parameters whose names match ``on``: together (``scope="global"``), or the sum over each of them.

    Subclasses write ``value`` and ``shrink`` for one array, and have ``on`` and perhaps ``scope`` among their fields.
    Other parameters do not enter the value, and the prox does not change them.

    >>> class Ridge(Selective):  # 1/2 |x|^2
    ...     def value(self, x):
    ...         return (x**2).sum(-1) / 2
    ...
    ...     def shrink(self, v, t):
    ...         return v / (1 + t)
    >>> Ridge().prox(torch.tensor([2.0, -4.0]), 1.0)
    tensor([ 1., -2.])
    """

    on: Patterns = None
    scope: Scope = "global"
    _numel: int = 0
    _blocks: tuple[Block, ...] | None = None

    @abstractmethod
    def value(self, x: Tensor) -> Tensor:
        """:math:`g` of one array."""

    @abstractmethod
    def shrink(self, v: Tensor, t: float) -> Tensor:
        """The prox of one array."""

    def view(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        """The shape in which a parameter is one array: here flat."""
        return (math.prod(shape),)

    def __post_init__(self) -> None:
        if (on := check_patterns(self, self.on)) is not None:  # a subclass without the field has None from the class
            object.__setattr__(self, "on", on)
        one_of(self, "scope", ("global", "per_tensor"))

    def __call__(self, x: Tensor) -> Tensor:
        if self.whole:
            return self.value(x)
        return sum((self.value(block.take(x)) for block in self._bound(x)), x.new_zeros(x.shape[:-1]))

    def prox(self, v: Tensor, t: float) -> Tensor:
        if not 0 <= t < float("inf"):
            raise ValueError(f"The step t of a prox must be a finite number >= 0, got {t!r}.")
        if not t and not self.indicator:
            return v
        if self.whole:
            return self.shrink(v, t)
        x = v.clone()
        for block in self._bound(v):
            block.put(self.shrink(block.take(v), t), x)
        return x

    def bind(self: Self, layout: Layout) -> Self:
        if self.whole:
            return self
        names = set(self.acts_on(layout))
        sizes = [math.prod(shape) for shape in layout.shapes]
        blocks = [
            Block((slice(end - size, end),), self.view(name, shape))
            for name, shape, size, end in zip(layout.names, layout.shapes, sizes, accumulate(sizes), strict=True)
            if name in names and size
        ]
        if self.scope == "global" and blocks:
            blocks = [Block(sum((b.slices for b in blocks), ()), (sum(math.prod(b.shape) for b in blocks),))]
        bound = copy.copy(self)
        object.__setattr__(bound, "_numel", layout.numel)
        object.__setattr__(bound, "_blocks", tuple(blocks))
        return bound

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        """Names of the parameters that match ``on``."""
        return layout.names if self.on is None else matching(self, self.on, layout.names)

    @property
    def whole(self) -> bool:
        """Whether ``g`` acts on the whole vector as one array, so that it needs no layout."""
        return self.on is None and self.scope == "global"

    def _bound(self, x: Tensor) -> tuple[Block, ...]:
        if self._blocks is None:
            raise needs_layout(self)
        if x.shape[-1] != self._numel:
            raise ValueError(
                f"{type(self).__name__} is bound to parameters with {self._numel} entries, but x has {x.shape[-1]}."
                " Bind it to the layout of x: g.bind(Layout.of(module))."
            )
        return self._blocks


class ConvexSet(Selective):
    """The indicator of a set: 0 inside, up to rounding, and ``inf`` outside. Subclasses write ``project``."""

    indicator = True

    @abstractmethod
    def project(self, v: Tensor) -> Tensor:
        """The nearest point of the set."""

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return self.project(v)

    def value(self, x: Tensor) -> Tensor:
        return outside(x, self.project(x))
