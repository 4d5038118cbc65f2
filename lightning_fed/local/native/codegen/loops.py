"""Generate C loops over arrays whose shapes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "unsigned char", torch.int64: "long long"}


@dataclass(frozen=True, eq=False)
class Place:
    """A tensor in a C array: ``meta`` has its type, shape, strides and offset."""

    name: str
    meta: Tensor

    @classmethod
    def new(cls, name: str, like: Tensor) -> Place:
        return cls(name, torch.empty(like.shape, dtype=like.dtype, device="meta"))

    @property
    def type(self) -> str:
        return TYPES[self.meta.dtype]

    def viewed(self, view: Callable[[Tensor], Tensor]) -> Place:
        return Place(self.name, view(self.meta))

    def at(self, index: Sequence[str], strides: Sequence[int]) -> str:
        terms = [f"{i} * {stride}" if stride != 1 else i for i, stride in zip(index, strides, strict=True) if stride]
        return f"{self.name}[{' + '.join([str(self.meta.storage_offset()), *terms])}]"


@dataclass(frozen=True, eq=False)
class Term:
    """An expression that is computed where it is used: C code with a field for each operand."""

    form: str
    operands: tuple[Place | Term | str, ...]
    shape: torch.Size

    def places(self) -> Iterator[Place]:
        for operand in self.operands:
            if isinstance(operand, Term):
                yield from operand.places()
            elif isinstance(operand, Place):
                yield operand

    def text(self, access: Callable[[Place], str]) -> str:
        def said(operand: Place | Term | str) -> str:
            if isinstance(operand, Term):
                return operand.text(access)
            return access(operand) if isinstance(operand, Place) else operand

        return f"({self.form.format(*map(said, self.operands))})"


def assign(to: Place, value: Term) -> list[str]:
    """Generate loops that assign an expression to every entry of a place."""
    shape, strides = _merged(to.meta.shape, [to, *value.places()])
    loops, index = _nest(shape)
    text = value.text(lambda place: place.at(index, strides[place]))
    return [*loops, f"{to.at(index, strides[to])} = {text};", *_ends(loops)]


def reduce(to: Place, value: Term, kept: Sequence[bool], start: str, form: str) -> list[str]:
    """Generate loops that reduce dimensions of the value that are not kept; ``to`` has size 1 in these dimensions."""
    wide = to.viewed(lambda meta: meta.expand(value.shape))
    own = {place: place.meta.expand(value.shape).stride() for place in [wide, *value.places()]}
    # kept dimensions innermost, so that neighbouring sums grow side by side; reversed if the last dimension is reduced
    order = sorted(range(len(kept)), key=lambda dim: kept[dim])
    if not kept or not _last(kept, value.shape):
        order.reverse()
    clear = assign(to, Term(start, (), to.meta.shape))
    loops, index = _nest([value.shape[dim] for dim in order])
    text = value.text(lambda place: place.at(index, [own[place][dim] for dim in order]))
    target = wide.at(index, [own[wide][dim] for dim in order])
    return [*clear, *loops, f"{target} = {form.format(target, text)};", *_ends(loops)]


def _last(kept: Sequence[bool], shape: Sequence[int]) -> bool:
    """Whether the last dimension with more than one entry is kept."""
    return next((keeps for keeps, size in zip(reversed(kept), reversed(shape), strict=True) if size > 1), True)


def _merged(shape: Sequence[int], places: Sequence[Place]) -> tuple[list[int], dict[Place, list[int]]]:
    """Merge dimensions that all places traverse as one; return the sizes and the strides of all places."""
    known = {place: place.meta.expand(shape).stride() for place in places}
    sizes: list[int] = []
    strides: dict[Place, list[int]] = {place: [] for place in known}
    for dim, size in enumerate(shape):
        if size == 1:
            continue
        if sizes and all(strides[place][-1] == own[dim] * size for place, own in known.items()):
            size *= sizes.pop()
            for taken in strides.values():
                taken.pop()
        sizes.append(size)
        for place, own in known.items():
            strides[place].append(own[dim])
    return sizes, strides


def _nest(shape: Sequence[int]) -> tuple[list[str], list[str]]:
    """Nested loops and their counters."""
    index = [f"i{depth}" for depth in range(len(shape))]
    loops = [f"for (int {i} = 0; {i} < {size}; {i}++) {{" for i, size in zip(index, shape, strict=True)]
    return loops, index


def _ends(loops: Sequence[str]) -> list[str]:
    return ["}"] * len(loops)
