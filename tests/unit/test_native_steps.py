"""Steps in C against the same steps in torch: every operator, every shape of a product, and what is refused."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from lightning_fed.local.graphs import Graphs
from lightning_fed.native import build
from lightning_fed.native.source import NoCodeError
from lightning_fed.native.steps import Steps
from lightning_fed.native.threads import spread

Step = Callable[..., list[Tensor]]

compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
needs_compiler = pytest.mark.skipif(compiler is None, reason="there is no C compiler")
each_precision = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=["float32", "float64"])

NAN, INF = float("nan"), float("inf")
ODD = [0.5, 0.0, -0.0, -0.3, NAN, INF, -INF, 2.0, -1.0, 1.0, 7.5, -40.0]


@pytest.fixture
def quickly(monkeypatch: pytest.MonkeyPatch) -> None:
    """Long code is compiled in less time."""
    monkeypatch.setattr(build, "_FLAGS", ["-O1", *build._FLAGS[1:]])


def one_by_one(
    step: Step, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]
) -> list[Tensor]:
    """What the steps of all clients leave, and the models they lead to."""
    m, models, left = len(client[0]), [], []
    for c in range(m):
        x, *rest = (t[c : c + 1] for t in client)
        for own in zip(*(part.unflatten(0, (m, -1))[c] for part in varying), strict=True):
            x, *results = step(x, *rest, *shared, *own)
            left.append(results)
        models.append(x)
    return [*(torch.stack(part) for part in zip(*left, strict=True)), torch.cat(models)]


def in_c(step: Step, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]) -> list[Tensor]:
    x = client[0].clone()
    code = Steps(step, [t[:1] for t in client], shared, [part[0] for part in varying])
    return [*code([x, *client[1:]], shared, varying), x]


def agree(step: Step, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]) -> None:
    expected = one_by_one(step, client, shared, varying)
    found = in_c(step, client, shared, varying)
    torch.testing.assert_close(found, expected, equal_nan=True)


def agree_each(functions: dict[str, Callable[..., Tensor]], *inputs: Tensor, dtype: torch.dtype) -> None:
    """Functions of the same inputs, all in one step; every one that differs is named."""
    x, varying = torch.zeros(1, 1, dtype=dtype), [t.unsqueeze(0) for t in inputs]

    def step(x: Tensor, *own: Tensor) -> list[Tensor]:
        return [x, *(function(*own) for function in functions.values())]

    wrong = []
    *found, _ = in_c(step, [x], [], varying)
    for (name, function), ours in zip(functions.items(), found, strict=True):
        try:
            torch.testing.assert_close(ours[0], function(*inputs), equal_nan=True)
        except AssertionError:
            wrong.append(f"{name}: {ours[0].tolist()} is not {function(*inputs).tolist()}")
    assert not wrong, "\n".join(wrong)


def refused(step: Step, *inputs: Tensor) -> None:
    with pytest.raises(NoCodeError):
        Steps(step, [torch.zeros(1, 4, dtype=torch.float64)], [], inputs)


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


def perceptron(x: Tensor, offset: Tensor, scale: Tensor, length: Tensor, rows: Tensor, labels: Tensor) -> list[Tensor]:
    """A step of a small classifier; its labels are one-hot."""

    def loss(w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        scores = torch.tanh(rows @ (w * scale).t()) @ v.t()
        return -(scores.log_softmax(1) * labels).sum(1).mean(), scores

    w, v = x[0, :20].view(4, 5), x[0, 20:].view(3, 4)
    slopes, scores = torch.func.grad(loss, (0, 1), has_aux=True)(w, v)
    slope = torch.cat([part.reshape(1, -1) for part in slopes], 1)
    return [x - length * (slope + 0.1 * (x - offset)), loss(w, v)[0], scores, scores.amax(1, keepdim=True) == scores]


def classes(m: int, steps: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor], list[Tensor]]:
    rows = torch.randn(m * steps, 7, 5, dtype=dtype)
    labels = torch.eye(3, dtype=dtype)[torch.randint(3, (m * steps, 7))]
    client = [torch.randn(m, 32, dtype=dtype), torch.randn(m, 32, dtype=dtype)]
    return client, [torch.rand(5, dtype=dtype)], [torch.rand(m * steps, dtype=dtype), rows, labels]


@needs_compiler
@each_precision
@pytest.mark.parametrize(("m", "steps"), [(1, 1), (1, 5), (4, 1), (5, 4)])
def test_steps_of_many_clients_are_those_of_each(m: int, steps: int, dtype: torch.dtype) -> None:
    agree(perceptron, *classes(m, steps, dtype))


@needs_compiler
def test_inputs_may_lie_anywhere_in_memory() -> None:
    client, shared, varying = classes(3, 4, torch.float64)
    elsewhere = [t.expand(3, 12, *t.shape[1:])[0] for t in varying]
    elsewhere[1] = varying[1].transpose(0, 2).contiguous().transpose(0, 2)
    elsewhere[0] = varying[0][:1].expand(12)
    agree(perceptron, [client[0], client[1][:1].expand(3, 32)], [shared[0][:1].expand(5)], elsewhere)


@needs_compiler
def test_the_number_of_threads_changes_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    problem, results = classes(7, 3, torch.float32), []
    for threads in (1, 2, 3, 16):
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        results.append(in_c(perceptron, *problem))
    for other in results[1:]:
        assert all(torch.equal(*pair) for pair in zip(results[0], other, strict=True))


@needs_compiler
def test_results_may_be_anything_a_step_has() -> None:
    captured = torch.randn(3, 4, dtype=torch.float64).t()
    unused = torch.randn(6, 2, dtype=torch.float64)

    def step(x: Tensor, a: Tensor, none: Tensor, unused: Tensor) -> list[Tensor]:
        y = a + 1
        return [x, x, x[0, 1:], a, a.t()[1:], y, y, y.t(), none, captured, captured[1], y.sum() > 0]

    varying = [torch.randn(6, 3, 4, dtype=torch.float64), torch.zeros(6, 0, 3, dtype=torch.float64), unused]
    agree(step, [torch.randn(2, 4, dtype=torch.float64)], [], varying)


@needs_compiler
def test_a_step_may_leave_nothing_but_the_model() -> None:
    agree(lambda x, a: [torch.sin(x) * a], [torch.randn(2, 3)], [], [torch.randn(8)])


@needs_compiler
def test_models_may_be_empty_or_a_single_number() -> None:
    for d in (0, 1):
        agree(lambda x, a: [x * a, x + 1], [torch.randn(2, d)], [], [torch.randn(4)])


def test_code_grows_with_the_number_of_operators_only(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths = []

    def noted(source: str) -> None:
        lengths.append(len(source))
        raise NoCodeError

    def step(x: Tensor, a: Tensor) -> list[Tensor]:
        for _ in range(12):
            x = x * x
        return [x]

    monkeypatch.setattr("lightning_fed.native.steps.built", noted)
    refused(step, torch.zeros(4))
    assert lengths[0] < 10_000


@pytest.mark.parametrize(
    "step",
    [
        lambda x, a: [x, a.round()],
        lambda x, a: [x, torch.div(a, 3, rounding_mode="floor")],
        lambda x, a: [x, a.clamp(a - 1, a)],
        lambda x, a: [x, a.sum(dtype=torch.float32)],
        lambda x, a: [x, a.to(torch.float16)],
        lambda x, a: [x, a.long() + 1],
        lambda x, a: [x, a.long().sum()],
        lambda x, a: [x, torch.as_strided(a, (2, 2), (1, 1)) * 1],
        lambda x, a: [x, a.view(torch.int64)],
        lambda x, a: [x, a.sort()[0]],
        lambda x, a: [x, torch.sin(a.expand(300_000, 4) * 2).t() @ torch.ones(300_000, 2, dtype=a.dtype)],
    ],
    ids=[
        "unknown",
        "rounded",
        "clamp by tensors",
        "sum in another precision",
        "half",
        "sum of whole numbers",
        "total of whole numbers",
        "strides",
        "bits",
        "several results",
        "large",
    ],
)
def test_what_is_not_known_is_refused(step: Step) -> None:
    refused(step, torch.zeros(4, dtype=torch.float64))


def test_a_next_model_of_another_shape_or_type_is_refused() -> None:
    a = torch.zeros(9, 4, dtype=torch.float64)
    refused(lambda x, a: [x + a], a)
    refused(lambda x, a: [x[:, :2] * 1], a)
    refused(lambda x, a: [x > 0], a)


@pytest.mark.parametrize(
    ("step", "given"),
    [
        (lambda x, a: [x, a.add_(1)], torch.zeros(4)),
        (lambda x, a: [x.mul_(2), a], torch.zeros(4)),
        (lambda x, a: [x, torch.rand_like(a)], torch.zeros(4)),
        (lambda x, a: [x, a + 1], torch.zeros(4, dtype=torch.uint8)),
        (lambda x, a: [x, a], torch.zeros(4, dtype=torch.bfloat16)),
        (lambda x, a: [x, a], torch.zeros(4, dtype=torch.complex64)),
        (lambda x, a: [x, None], torch.zeros(4)),
        (lambda x, a: [x, a[:0].mean(1)], torch.zeros(4, 4)),
        (lambda x, a: [x, a.nonzero()], torch.zeros(4)),
    ],
    ids=["writes", "writes to the model", "random", "bytes", "bfloat16", "complex", "none", "empty", "any size"],
)
def test_steps_that_cannot_be_written_in_c_are_replayed(step: Step, given: Tensor) -> None:
    varying = [given.expand(6, *given.shape).clone()]
    assert Graphs(False).in_c("key", step, [torch.zeros(2, 4)], [], varying) is None


@needs_compiler
def test_data_without_numbers_are_no_obstacle() -> None:
    def step(x: Tensor, a: Tensor) -> list[Tensor]:
        return [x + a.sum(), x]

    Graphs(False).in_c("key", step, [torch.zeros(2, 4)], [], [torch.zeros(6, 3, 0)])  # code or none, but no error


@needs_compiler
def test_code_that_differs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    given = [torch.randn(2, 4)], [], [torch.randn(6)]
    assert Graphs(False).in_c("key", lambda x, a: [x.sin() * a], *given) is not None
    monkeypatch.setattr(Steps, "__call__", lambda *_: [])
    assert Graphs(False).in_c("key", lambda x, a: [x.sin() * a], *given) is None


@pytest.mark.parametrize("text", ["exit 1", "exit 0", "echo no library > steps.so; echo no >&2; kill $$"])
def test_a_compiler_that_fails_is_no_obstacle(text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broken = tmp_path / "cc"
    broken.write_text(f"#!/bin/sh\n{text}\n")
    broken.chmod(0o755)
    monkeypatch.setenv("CC", str(broken))
    with pytest.raises((OSError, subprocess.CalledProcessError)):
        build.built.__wrapped__(f"int failing; /* {text} */")
    step = {"exit 1": torch.sin, "exit 0": torch.cos}.get(text, torch.tanh)
    monkeypatch.setattr("lightning_fed.native.steps.built", build.built.__wrapped__)
    assert Graphs(False).in_c("key", lambda x, a: [step(x) * a], [torch.randn(2, 4)], [], [torch.randn(6)]) is None
    assert not [file for file in (tmp_path / "cache" / "native").iterdir() if file.is_dir()]


@needs_compiler
def test_a_compiler_with_options_gives_way_to_another(monkeypatch: pytest.MonkeyPatch) -> None:
    if shutil.which("gcc") is None:
        pytest.skip("there is no gcc")
    monkeypatch.setenv("CC", "ccache cc -m64")
    assert build.built.__wrapped__("int one(void) { return 1; }").one() == 1


def test_a_folder_that_cannot_be_written_is_no_obstacle(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("LIGHTNING_FED_CACHE", str(tmp_path / "file" / "cache"))
    monkeypatch.setattr("lightning_fed.native.steps.built", build.built.__wrapped__)
    Graphs(False).in_c("key", lambda x, a: [x.cos() - a], [torch.randn(2, 4)], [], [torch.randn(6)])  # no error


@needs_compiler
def test_what_was_compiled_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = "int two(void) { return 2; }"
    assert build.built.__wrapped__(source).two() == 2
    monkeypatch.setattr(subprocess, "run", None)
    assert build.built.__wrapped__(source).two() == 2
    assert [file.suffix for file in (tmp_path / "cache" / "native").iterdir()] == [".so"]


@needs_compiler
def test_many_may_compile_the_same_at_once(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        libraries = list(pool.map(build.built.__wrapped__, ["int three(void) { return 3; }"] * 4))
    assert [library.three() for library in libraries] == [3] * 4
    assert len(list((tmp_path / "cache" / "native").iterdir())) == 1


def test_interrupted_work_has_ended_before_its_memory_is_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    ended: list[int] = []

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    def work(first: int, last: int) -> None:
        if first == 0:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGUSR1)
        time.sleep(0.2)
        ended.append(first)

    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    before = signal.signal(signal.SIGUSR1, interrupt)
    try:
        with pytest.raises(KeyboardInterrupt):
            spread(work, 2)
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert sorted(ended) == [0, 1]
