"""Generate products of small matrices in C, accumulated in registers.

They are separate functions, because only they may fuse products and sums: elsewhere a * b - a * b has to be 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from lightning_fed.local.native.codegen.loops import Place, Term, assign

#: Numbers of entries in a vector of 32 bytes.
LANES = {torch.float32: 8, torch.float64: 4}
#: Maximum number of rows of a tile: 6 rows of 2 vectors of sums leave 4 of 16 registers for operands.
TILE_ROWS = 6
#: Minimum number of rows for copying the second matrix to row-major order first.
TURNING_ROWS = 6


def function(name: str, to: Place, a: Place, b: Place) -> list[str]:
    """Generate the function that multiplies two matrices with the shapes and strides of the places."""
    to, a, b = (_alone(own, place) for own, place in (("to", to), ("a", a), ("b", b)))
    # noinline: inlined, the body would be compiled like its caller, in which products and sums are not fused
    return [
        f"__attribute__((noinline)) static void {name}(T *restrict to, const T *restrict a, const T *restrict b) {{",
        *_body(to, a, b),
        "}",
    ]


def call(name: str, *places: Place) -> str:
    """Generate the call for two matrices, or for all matrices of two stacks."""
    if places[0].meta.dim() == 2:
        return f"{name}({', '.join(f'{place.name} + {place.meta.storage_offset()}' for place in places)});"
    steps = (f"{place.name} + {place.meta.storage_offset()} + m * {place.meta.stride(0)}" for place in places)
    return f"for (int m = 0; m < {len(places[0].meta)}; m++) {name}({', '.join(steps)});"


def _alone(name: str, place: Place) -> Place:
    shape, strides = place.meta.shape[-2:], place.meta.stride()[-2:]
    return Place(name, torch.empty_strided(shape, strides, dtype=place.meta.dtype, device="meta"))


def _body(to: Place, a: Place, b: Place) -> list[str]:
    rows, columns = to.meta.shape
    # tiles load vectors from rows of b, which must be contiguous; otherwise take dot products, or copy b first
    if b.meta.stride(1) == 1 or columns == 1:
        return _by_tiles(to, a, b)
    if rows < TURNING_ROWS and b.meta.stride(0) == 1 and a.meta.stride(1) == 1:
        return _by_dots(to, a, b)
    turned = Place.new("turned", b.meta)
    copying = assign(turned, Term("{0}", (b,), b.meta.shape))
    return [f"_Alignas(64) T turned[{b.meta.numel()}];", *copying, *_by_tiles(to, a, turned)]


def _by_tiles(to: Place, a: Place, b: Place) -> list[str]:
    rows, columns = to.meta.shape
    share = -(-rows // -(-rows // TILE_ROWS))  # rows per tile, as even as possible
    whole = rows // share * share
    lines = []
    for first, sizes in _tiles(columns, LANES[to.meta.dtype]):
        lines += [f"for (int i = 0; i < {whole}; i += {share}) {{", *_tile(to, a, b, share, first, sizes), "}"]
        if whole < rows:
            lines += ["{", f"const int i = {whole};", *_tile(to, a, b, rows - whole, first, sizes), "}"]
    return lines


def _tiles(columns: int, lanes: int) -> Iterator[tuple[int, list[int]]]:
    """Yield the first column of each tile, and the sizes of its one or two vectors."""
    first, sizes = 0, list[int]()
    while first + sum(sizes) < columns:
        left = columns - first - sum(sizes)
        sizes.append(min(lanes, 1 << left.bit_length() - 1))
        if len(sizes) == 2 or sizes[-1] == left:
            yield first, sizes
            first, sizes = first + sum(sizes), []


def _tile(to: Place, a: Place, b: Place, rows: int, first: int, sizes: Sequence[int]) -> list[str]:
    """Generate one tile of a product, whose sums stay in registers until they are stored."""
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


def _by_dots(to: Place, a: Place, b: Place) -> list[str]:
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
