"""Operators in C against torch's: on all sorts of numbers, types and shapes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from itertools import product

import pytest
import torch
from helpers.c_steps import agree, agree_each, each_precision, needs_compiler
from torch import Tensor
from torch.nn import functional

from lightning_fed.core import compiler as build
from lightning_fed.local.native.codegen.lowering import NoCodeError

NAN, INF = float("nan"), float("inf")
ODD = [0.5, 0.0, -0.0, -0.3, NAN, INF, -INF, 2.0, -1.0, 1.0, 7.5, -40.0]


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long code is compiled in less time."""
    monkeypatch.setattr(build, "_FLAGS", ["-O1", *build._FLAGS[1:]])


ONE: dict[str, Callable[[Tensor], Tensor]] = {
    "add": lambda a: a + 1.5,
    "add, with a factor": lambda a: torch.add(a, a[:1], alpha=-2),
    "sub": lambda a: a - 3,
    "sub, with a factor": lambda a: torch.sub(a, a[1:2], alpha=0.5),
    "rsub, with a factor": lambda a: torch.rsub(a, 2, alpha=3),
    "rsub": lambda a: 1 - a,
    "mul": lambda a: a * -0.25,
    "mul by a tiny number": lambda a: a * 1e-300,
    "div": lambda a: a / 3,
    "division of a number": lambda a: -2 / a,
    "neg": lambda a: -a,
    "neg of a negative number": lambda a: -(a * -1),
    "reciprocal": torch.reciprocal,
    "relu": torch.relu,
    "abs": torch.abs,
    "exp": torch.exp,
    "log": torch.log,
    "expm1": torch.expm1,
    "log1p": torch.log1p,
    "sqrt": torch.sqrt,
    "rsqrt": torch.rsqrt,
    "sin": torch.sin,
    "cos": torch.cos,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "sigmoid": torch.sigmoid,
    "maximum": lambda a: torch.maximum(a, a[:1]),
    "maximum of nan": lambda a: torch.maximum(a[4:5], a),
    "minimum": lambda a: torch.minimum(a, a[7:8]),
    "minimum of nan": lambda a: torch.minimum(a[4:5], a),
    "square": lambda a: a**2,
    "cube": lambda a: a**3,
    "power 0": lambda a: a**0,
    "power -1": lambda a: a**-1,
    "power -2": lambda a: a**-2,
    "power 1.5": lambda a: a**1.5,
    "power of a number": lambda a: 2.0**a,
    "power of a tensor": lambda a: a ** a[7:8],
    "clamp": lambda a: a.clamp(-0.1, 1.5),
    "clamp from below": lambda a: a.clamp(min=0),
    "clamp from above": lambda a: a.clamp(max=0.25),
    "clamp with bounds the other way round": lambda a: a.clamp(1, 0),
    "where": lambda a: torch.where(a > 0, a, -2 * a),
    "where, of numbers": lambda a: torch.where(a > 0, a, NAN),
    "where, of infinity": lambda a: torch.where(a > 0, -INF, a),
    "eq": lambda a: a == 0,
    "ne": lambda a: a != 0.5,
    "lt": lambda a: a < a[:1],
    "le": lambda a: a <= 1,
    "gt": lambda a: a > -0.3,
    "ge": lambda a: a >= a[7:8],
    "logical and": lambda a: torch.logical_and(a > 0, a < 2),
    "logical or": lambda a: torch.logical_or(a < 0, a > 1),
    "logical not": lambda a: torch.logical_not(a > 0),
    "a mask as numbers": lambda a: (a > 0) * a - (a > 1).to(a.dtype),
    "full like": lambda a: torch.full_like(a, -0.0) + a,
    "zeros": lambda a: torch.zeros_like(a) - a,
    "ones": lambda a: torch.ones_like(a),
    "clone": torch.clone,
    "itself": lambda a: a,
    "softmax": lambda a: a[7:].softmax(0),
    "log softmax": lambda a: a[7:].log_softmax(0),
    "logsumexp": lambda a: a[7:].logsumexp(0),
    "gelu": functional.gelu,
    "gelu by tanh": lambda a: functional.gelu(a, approximate="tanh"),
    "elu": functional.elu,
    "silu": functional.silu,
    "leaky relu": functional.leaky_relu,
    "hardtanh": functional.hardtanh,
    "norm": lambda a: torch.linalg.vector_norm(a[7:]),
    "layer norm": lambda a: functional.layer_norm(a[7:].view(1, 5), (5,)),
}


@needs_compiler
@each_precision
def test_operators_on_every_number_are_torchs(dtype: torch.dtype) -> None:
    agree_each(ONE, torch.tensor(ODD, dtype=dtype), dtype=dtype)


SHAPES: dict[str, Callable[[Tensor], Tensor]] = {  # of a (2, 3, 4)
    "sum": torch.sum,
    "sum over the first": lambda a: a.sum(0),
    "sum over the last, kept": lambda a: a.sum(-1, keepdim=True),
    "sum over two": lambda a: a.sum((0, -1)),
    "sum over the middle": lambda a: a.sum(1),
    "sum over none": lambda a: a.sum([]),
    "sum of a turned one": lambda a: a.transpose(0, 2).sum(0),
    "sum of an expanded one": lambda a: a[:, :1].expand(2, 5, 4).sum(1),
    "sum of a number": lambda a: a[0, 0, 0].sum(),
    "sum of nothing": lambda a: a[:, :0].sum(1),
    "sum of a term": lambda a: (a * 2 + a[0]).sum((1, 2)),
    "mean": torch.mean,
    "mean over some": lambda a: a.mean((-1, 0), keepdim=True),
    "mean of nothing": lambda a: a[:, :0].mean(1),
    "amax": torch.amax,
    "amax over some": lambda a: a.amax((0, 2)),
    "amax, kept": lambda a: a.amax(-2, keepdim=True),
    "cat": lambda a: torch.cat([a, a[:, :1]], 1),
    "cat at the end": lambda a: torch.cat([a, a[..., :0], 2 * a[..., ::2]], -1),
    "cat of one": lambda a: torch.cat([a.transpose(0, 1)]),
    "stack": lambda a: torch.stack([a, a * 2, a], -1),
    "split": lambda a: a.split(3, -1)[1] * 2,
    "split in sizes": lambda a: a.split([1, 0, 2], 1)[2] + 1,
    "nothing": lambda a: a.split([1, 0, 2], 1)[1] + 1,
    "chunk": lambda a: a.chunk(2, 2)[1] * 1,
    "unbind": lambda a: a.unbind(1)[-1] * a.unbind(1)[0],
    "slices": lambda a: a[:, ::2, 1::2] + 1,
    "select": lambda a: a[1, :, -1] * a[0, 2, 0],
    "turned and flattened": lambda a: a.permute(2, 0, 1).reshape(8, 3),
    "turned, sliced, flattened": lambda a: a.transpose(0, 2)[::2].flatten() + 1,
    "flattened and turned": lambda a: (a + 1).flatten(1).t().reshape(-1, 4)[1:, ::3] * 1,
    "expanded and flattened": lambda a: a[0].expand(2, 3, 4).reshape(6, 4)[::5],
    "windows": lambda a: a.unfold(2, 3, 1) * 2,
    "diagonal": lambda a: a.diagonal(1, 1, 2) + a.diagonal(0, 0, 1).sum(),
    "squeezed": lambda a: a[:1].squeeze(0).unsqueeze(-1).squeeze() * a[:, :1, :1],
    "broadcast": lambda a: a[:, :1] + a[:1, :, :1] * a[0, 0, 0],
    "of any shape": lambda a: a.movedim(0, -1).reshape(4, 3, 2).transpose(0, 1).flatten(1, 2) - 1,
    "full": lambda a: torch.full((2, 3, 1), 3, dtype=a.dtype) + a,
    "expanded product": lambda a: a[0] @ a[0, 0, :, None].expand(4, 5),
    "product with a row again and again": lambda a: a[0, :1].expand(7, 4) @ a[1].t(),
    "product with a column again and again": lambda a: a[0, :, :1].expand(3, 4) @ a[1].t(),
    "product of slices": lambda a: a[:, ::2, 1] @ a[:, 0, ::2],
    "product of turned slices": lambda a: a[0, :, ::2].t() @ a[1, :, ::3],
    "products of stacks": lambda a: a @ a.transpose(1, 2),
    "products of expanded stacks": lambda a: torch.bmm(a[:1].expand(3, 3, 4), a[0].t().expand(3, 4, 3)),
    "products of stacks beside": lambda a: torch.bmm(a.transpose(0, 1), a.permute(1, 2, 0)),
    "products of vectors": lambda a: a[0] @ a[1, 0] * (a[0, 0] @ a[1, 1]),
    "outer product": lambda a: torch.outer(a[0, 0], a[1, :, 0]),
    "product over nothing": lambda a: a[0, :, :0] @ a[1, :, :0].t(),
    "product with no columns": lambda a: a[0] @ a[1, 0, :, None][:, :0],
    "affine": lambda a: torch.addmm(a[0, 0, :3], a[0], a[1].t(), beta=0.5, alpha=-2),
}


@needs_compiler
@each_precision
def test_operators_on_shapes_are_torchs(dtype: torch.dtype) -> None:
    agree_each(SHAPES, torch.randn(2, 3, 4, dtype=dtype), dtype=dtype)


@needs_compiler
@each_precision
def test_operators_on_what_is_not_a_number_are_torchs(dtype: torch.dtype) -> None:
    inputs = torch.randn(2, 3, 4, dtype=dtype)
    inputs[0, 1, 2], inputs[1, 0, 0] = NAN, -INF
    agree_each({name: SHAPES[name] for name in SHAPES if name.startswith(("sum", "a"))}, inputs, dtype=dtype)


MIXED: dict[str, Callable[..., Tensor]] = {  # of whole numbers, truth values and numbers
    "whole numbers and numbers": lambda i, b, a: i + a,
    "truth values and numbers": lambda i, b, a: b * a + b,
    "a number as a whole one": lambda i, b, a: a.long(),
    "a whole number as a number": lambda i, b, a: i.to(a.dtype),
    "a truth value as a whole number": lambda i, b, a: b.long(),
    "compare whole numbers": lambda i, b, a: i == 2**60 + 1,
    "compare with the least": lambda i, b, a: i > -(2**63),
    "compare whole numbers with a half": lambda i, b, a: i > 0.5,
    "compare whole numbers and numbers": lambda i, b, a: i <= a,
    "compare truth values": lambda i, b, a: b < 2,
    "compare truth values with each other": lambda i, b, a: b == (i > 0),
    "choose whole numbers": lambda i, b, a: torch.where(b, i, -7),
    "choose of two kinds": lambda i, b, a: torch.where(b, i, a),
    "choose truth values": lambda i, b, a: torch.where(b, i > 3, a > 0),
    "cat of two kinds": lambda i, b, a: torch.cat([i, a]),
    "cat of whole numbers": lambda i, b, a: torch.cat([i, b.long()]),
    "full of whole numbers": lambda i, b, a: torch.full((2,), 2**40 + 1),
    "full of truth values": lambda i, b, a: torch.logical_or(torch.full((6,), False), b),
    "turned": lambda i, b, a: i.view(2, 3).t() > b.view(2, 3).t(),
    "mean of truth values": lambda i, b, a: b.mean(dtype=a.dtype),
    "mean of whole numbers": lambda i, b, a: i[:4].sum(dtype=a.dtype),
}
WHOLE = [0, 3, 256, -7, 2**40 + 1, 2**60 + 1]


def mixed(functions: dict[str, Callable[..., Tensor]], dtype: torch.dtype) -> None:
    i, b = torch.tensor(WHOLE), torch.tensor([True, False, True, True, False, False])
    a = torch.tensor([0.5, -0.0, 3.0, -7.9, 1e9, 0.0], dtype=dtype)
    agree_each(functions, i, b, a, dtype=dtype)


@needs_compiler
@each_precision
def test_operators_on_operands_of_several_types_are_torchs(dtype: torch.dtype) -> None:
    mixed(MIXED, dtype)


@needs_compiler
@each_precision
def test_whatever_is_not_zero_is_true(dtype: torch.dtype) -> None:
    functions: dict[str, Callable[..., Tensor]] = {
        "a number": lambda i, b, a: a.bool(),
        "a whole number": lambda i, b, a: i.bool(),
        "not": lambda i, b, a: torch.logical_not(a),
        "not a whole number": lambda i, b, a: torch.logical_not(i),
        "and": lambda i, b, a: torch.logical_and(i, a),
        "or": lambda i, b, a: torch.logical_or(i, a),
        "full": lambda i, b, a: torch.full((2,), 0.5, dtype=torch.bool),
        "full of twos": lambda i, b, a: torch.full((6,), 2, dtype=torch.bool) == torch.full((6,), True),
    }
    mixed(functions, dtype)


def one_of_whole_numbers(function: Callable[[Tensor], Tensor], whole: list[int], dtype: torch.dtype) -> None:
    """Whole numbers are exact, or refused."""
    with suppress(NoCodeError):
        agree_each({"whole": function}, torch.tensor(whole), dtype=dtype)


@needs_compiler
@each_precision
@pytest.mark.parametrize(
    ("function", "whole"),
    [
        (lambda i: i.clamp(min=0), WHOLE),
        (lambda i: i**2, [2**24 + 1, -3]),
        (lambda i: i**3, [1_000_001, -3]),
        (lambda i: i**i, [13, 2]),
    ],
    ids=["clamp", "square", "cube", "power of a tensor"],
)
def test_whole_numbers_stay_whole(function: Callable[[Tensor], Tensor], whole: list[int], dtype: torch.dtype) -> None:
    one_of_whole_numbers(function, whole, dtype)


@needs_compiler
def test_squares_of_whole_numbers_as_numbers_do_not_overflow() -> None:
    one_of_whole_numbers(lambda i: i**2.0, [10**10, 3], torch.float32)


@needs_compiler
@each_precision
def test_roots_by_powers_are_torchs(dtype: torch.dtype) -> None:
    functions: dict[str, Callable[..., Tensor]] = {"root": lambda a: a**0.5, "one over it": lambda a: a**-0.5}
    agree_each(functions, torch.tensor(ODD, dtype=dtype), dtype=dtype)


@needs_compiler
def test_equal_products_cancel_out() -> None:
    a, b = torch.rand(2, 64) + 0.1
    agree_each({"root of 0": lambda a, b, same: (a * b - same * b).sqrt()}, a, b, a.clone(), dtype=torch.float32)


@needs_compiler
def test_numbers_beyond_single_precision_are_torchs() -> None:
    functions: dict[str, Callable[..., Tensor]] = {
        "product": lambda a: a * 1e39,
        "sum": lambda a: a + -1e39,
        "less": lambda a: a < 1e39,
        "more": lambda a: a > -1e300,
        "tiny": lambda a: a == 1e-300,
    }
    agree_each(functions, torch.tensor(ODD), dtype=torch.float32)


@needs_compiler
@pytest.mark.parametrize(("own", "other"), [(torch.float32, torch.float64), (torch.float64, torch.float32)])
def test_inputs_of_another_precision_are_converted(own: torch.dtype, other: torch.dtype) -> None:
    def step(x: Tensor, a: Tensor, n: Tensor) -> list[Tensor]:
        return [x + a.to(x.dtype), a, a < x[0], x * n.to(x.dtype), a.to(x.dtype).sum()]

    varying = [torch.randn(6, 4, dtype=other), torch.randn(6, dtype=other)]
    agree(step, [torch.randn(2, 4, dtype=own)], [], varying)


SIZES = [1, 2, 3, 4, 5, 6, 7, 8, 9, 12, 13, 17, 20]


@needs_compiler
@each_precision
@pytest.mark.parametrize("turned", list(product([False, True], repeat=2)), ids=["", "b", "a", "both"])
def test_products_of_all_shapes_are_torchs(turned: tuple[bool, bool], dtype: torch.dtype, quickly: None) -> None:
    first = 2 * turned[0] + turned[1]  # of the kinds of operands together, all pairs of sizes
    pairs = [(r, c) for r, c in product(range(13), repeat=2) if (r + c) % 4 == first]
    chosen = [(SIZES[r], SIZES[c], SIZES[(2 * r + c) % 13]) for r, c in pairs]

    def matrix(rows: int, columns: int, turn: bool, values: Tensor) -> Tensor:
        flat = values[: rows * columns]
        return flat.view(columns, rows).t() if turn else flat.view(rows, columns)

    functions = {
        f"{r} x {k} x {c}": lambda a, b, r=r, c=c, k=k: matrix(r, k, turned[0], a) @ matrix(k, c, turned[1], b)
        for r, c, k in chosen
    }
    a, b = torch.randn(2, 400, dtype=dtype)
    agree_each(functions, a, b, dtype=dtype)
