"""Loops in C over arrays whose shapes are known."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

TYPES = {torch.float32: "float", torch.float64: "double", torch.bool: "unsigned char", torch.int64: "long long"}

#: Numbers in a vector of 32 bytes.
LANES = {torch.float32: 8, torch.float64: 4}
#: Rows of a product that are summed up side by side, in registers.
ROWS_TOGETHER = 6
#: Rows from which on it pays to turn a matrix over first.
ROWS = 6


@dataclass(frozen=True, eq=False)
class Place:
    """Numbers in an array: ``meta`` has their type, shape and strides, and where they begin."""

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

    def apart(self) -> list[Place]:
        """Along the first dimension."""
        return [Place(self.name, part) for part in self.meta.unbind()]

    def at(self, index: Sequence[str], strides: Sequence[int]) -> str:
        terms = [f"{i} * {stride}" if stride != 1 else i for i, stride in zip(index, strides, strict=True) if stride]
        return f"{self.name}[{' + '.join([str(self.meta.storage_offset()), *terms])}]"


@dataclass(frozen=True, eq=False)
class Term:
    """Numbers that are computed where they are used: C code with a field for each operand."""

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
    """Every number of a place."""
    shape, strides = _merged(to.meta.shape, [to, *value.places()])
    loops, index = _nest(shape)
    text = value.text(lambda place: place.at(index, strides[place]))
    return [*loops, f"{to.at(index, strides[to])} = {text};", *_ends(loops)]


def reduce(to: Place, value: Term, kept: Sequence[bool], start: str, form: str) -> list[str]:
    """Along the dimensions of the value that are not kept; ``to`` has its dimensions, those with size 1."""
    wide = to.viewed(lambda meta: meta.expand(value.shape))
    own = {place: place.meta.expand(value.shape).stride() for place in [wide, *value.places()]}
    order = sorted(range(len(kept)), key=lambda dim: kept[dim])  # numbers that are kept side by side
    if not kept or not _last(kept, value.shape):
        order.reverse()
    clear = assign(to, Term(start, (), to.meta.shape))
    loops, index = _nest([value.shape[dim] for dim in order])
    text = value.text(lambda place: place.at(index, [own[place][dim] for dim in order]))
    target = wide.at(index, [own[wide][dim] for dim in order])
    return [*clear, *loops, f"{target} = {form.format(target, text)};", *_ends(loops)]


def product(to: Place, a: Place, b: Place, turned: Callable[[Place], tuple[Place, list[str]]]) -> list[str]:
    """Of two matrices, or two stacks of them; ``turned`` copies a matrix whose columns lie side by side."""
    if to.meta.dim() == 3:
        stacks = zip(to.apart(), a.apart(), b.apart(), strict=True)
        return [line for matrices in stacks for line in product(*matrices, turned)]
    rows, columns = to.meta.shape
    if b.meta.stride(1) != 1 and columns > 1:
        if rows < ROWS and b.meta.stride(0) == 1 and a.meta.stride(1) == 1:
            return _dots(to, a, b)
        b, copying = turned(b)
        return [*copying, *product(to, a, b, turned)]
    share = -(-rows // -(-rows // ROWS_TOGETHER))
    lines = []
    for first, vectors in _tiles(columns, LANES[to.meta.dtype]):
        whole = rows // share
        lines += [f"for (int i = 0; i < {whole * share}; i += {share}) {{"]
        lines += [*_tile(to, a, b, share, first, vectors), "}"]
        if rest := rows - whole * share:
            lines += ["{", f"const int i = {whole * share};", *_tile(to, a, b, rest, first, vectors), "}"]
    return lines


def _tiles(columns: int, lanes: int) -> Iterator[tuple[int, list[int]]]:
    """Beginnings of groups of columns, and the sizes of the vectors they make."""
    first, sizes = 0, list[int]()
    while first + sum(sizes) < columns:
        left = columns - first - sum(sizes)
        sizes.append(min(lanes, 1 << left.bit_length() - 1))
        if len(sizes) == 2 or sizes[-1] == left:
            yield first, sizes
            first, sizes = first + sum(sizes), []


def _tile(to: Place, a: Place, b: Place, rows: int, first: int, sizes: Sequence[int]) -> list[str]:
    """So many rows and columns of a product, summed up in registers."""
    begin = [first + sum(sizes[:v]) for v in range(len(sizes))]
    cells = [(r, v) for r in range(rows) for v in range(len(sizes))]
    return [
        *(f"V{sizes[v]} s{r}_{v} = {{0}};" for r, v in cells),
        f"for (int k = 0; k < {a.meta.shape[1]}; k++) {{",
        *(f"const V{n} b{v} = LOAD({n}, {b.at(['k'], b.meta.stride()[:1])}, {begin[v]});" for v, n in enumerate(sizes)),
        *(f"s{r}_{v} += {a.at([f'(i + {r})', 'k'], a.meta.stride())} * b{v};" for r, v in cells),
        "}",
        *(f"STORE({sizes[v]}, {to.at([f'(i + {r})'], to.meta.stride()[:1])}, {begin[v]}, s{r}_{v});" for r, v in cells),
    ]


def _dots(to: Place, a: Place, b: Place) -> list[str]:
    (rows, inner), columns = a.meta.shape, b.meta.shape[1]
    return [
        f"for (int i = 0; i < {rows}; i++)",
        f"for (int j = 0; j < {columns}; j++) {{",
        f"{to.type} sum = 0;",
        "#pragma omp simd reduction(+ : sum)",
        f"for (int k = 0; k < {inner}; k++)",
        f"sum += {a.at(['i', 'k'], a.meta.stride())} * {b.at(['k', 'j'], b.meta.stride())};",
        f"{to.at(['i', 'j'], to.meta.stride())} = sum;",
        "}",
    ]


def _last(kept: Sequence[bool], shape: Sequence[int]) -> bool:
    """Whether the last dimension that matters is kept."""
    return next((keeps for keeps, size in zip(reversed(kept), reversed(shape), strict=True) if size > 1), True)


def _merged(shape: Sequence[int], places: Sequence[Place]) -> tuple[list[int], dict[Place, list[int]]]:
    """As few dimensions as will do, and the strides of all places in them."""
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
    """Loops, one in the other, and their counters."""
    index = [f"i{depth}" for depth in range(len(shape))]
    loops = [f"for (int {i} = 0; {i} < {size}; {i}++) {{" for i, size in zip(index, shape, strict=True)]
    return loops, index


def _ends(loops: Sequence[str]) -> list[str]:
    return ["}"] * len(loops)
