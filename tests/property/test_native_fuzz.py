"""Whatever supported operators a step is made of: the C code leads where torch leads, or there is none."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_fed.core import compiler as build
from lightning_fed.local.native.codegen.lowering import NoCodeError
from lightning_fed.local.native.codegen.program import Steps

compiler = shutil.which(os.environ.get("CC", "cc")) or shutil.which("gcc")
pytestmark = pytest.mark.skipif(compiler is None, reason="there is no C compiler")

few = settings(
    max_examples=30,
    deadline=None,
    derandomize=True,
    print_blob=False,
    phases=[Phase.explicit, Phase.generate],  # every try is compiled: smaller examples would take minutes
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.function_scoped_fixture, HealthCheck.data_too_large],
)

CLIENTS, STEPS = 2, 3
EXACT = 4  # inputs of a step

#: Of one tensor and a whole number; small errors stay small.
ONE: list[Callable[[Tensor, int], Tensor]] = [
    lambda a, n: a.tanh(),
    lambda a, n: a.sin() * n,
    lambda a, n: -a,
    lambda a, n: a.abs(),
    lambda a, n: a.sigmoid(),
    lambda a, n: a.relu() - n,
    lambda a, n: a.tanh().exp(),
    lambda a, n: a.abs().log1p(),
    lambda a, n: (a.abs() + 1).log(),
    lambda a, n: (a.abs() + 1).rsqrt(),
    lambda a, n: a.tanh() ** 2,
    lambda a, n: a.clamp(-1, n / 4),
    lambda a, n: a.softmax(n % max(a.dim(), 1)),
    lambda a, n: a / (n + 1),
    lambda a, n: torch.full_like(a, n) + a,
]
#: Of two tensors that can be broadcast.
TWO: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.add,
    torch.sub,
    lambda a, b: torch.sub(a, b, alpha=-0.5),
    lambda a, b: a.tanh() * b.tanh(),
    lambda a, b: a / (b.abs() + 1),
    torch.maximum,
    torch.minimum,
    lambda a, b: a.tanh() @ b.tanh(),
    lambda a, b: a.tanh() @ b.tanh().transpose(-1, -2),
    lambda a, b: a.tanh().transpose(-1, -2) @ b.tanh(),
]
#: The numbers of one tensor in another shape, or fewer of them.
SHAPES: list[Callable[[Tensor, int, int], Tensor]] = [
    lambda a, n, d: a.transpose(d, n % a.dim()),
    lambda a, n, d: a.narrow(d, n % a.shape[d], a.shape[d] - n % a.shape[d]),
    lambda a, n, d: a.unsqueeze(d),
    lambda a, n, d: a.select(d, n % a.shape[d]),
    lambda a, n, d: a.flatten(),
    lambda a, n, d: a.reshape(-1, a.shape[d]),
    lambda a, n, d: a.select(d, 0).unsqueeze(d).expand(*a.shape),
    lambda a, n, d: a.split(1 + n % 2, d)[-1],
    lambda a, n, d: a.unbind(d)[n % a.shape[d]],
    lambda a, n, d: torch.cat([a, a.narrow(d, 0, n % a.shape[d])], d),
    lambda a, n, d: torch.stack([a, a], d)[..., ::2],
    lambda a, n, d: a.movedim(d, -1).contiguous(),
    lambda a, n, d: a.unfold(d, 1 + n % a.shape[d], 1),
]
FOLDS: list[Callable[[Tensor, Any, bool], Tensor]] = [
    lambda a, dims, keep: a.sum(dims, keep),
    lambda a, dims, keep: a.mean(dims, keep),
    lambda a, dims, keep: a.amax(dims, keep),
]
#: Truth values, of numbers that are known to the last bit.
MASKS: list[Callable[[Tensor, Tensor], Tensor]] = [
    torch.lt,
    torch.ge,
    torch.eq,
    lambda a, b: torch.logical_and(a > 0, b < 1),
    lambda a, b: torch.logical_not(a != b),
]

Stage = tuple[int, int, int, int, bool]
stages = st.lists(st.tuples(*[st.integers(0, 10**6)] * 4, st.booleans()), min_size=1, max_size=10)
shapes = st.lists(st.integers(1, 5), max_size=3).map(tuple)


def made(pool: list[Tensor], stage: Stage) -> Tensor:
    """One more tensor, of some that there are."""
    kind, which, first, second, flag = stage
    a, b, c = pool[first % len(pool)], pool[second % len(pool)], pool[which % len(pool)]
    dim = second % a.dim() if a.dim() else 0
    if kind % 5 == 0:
        return ONE[which % len(ONE)](a, second % 7)
    if kind % 5 == 1:
        return TWO[which % len(TWO)](a, b)
    if kind % 5 == 2:
        return SHAPES[which % len(SHAPES)](a, second % 7, dim)
    if kind % 5 == 3:
        return FOLDS[which % len(FOLDS)](a, [dim, (dim + 1) % a.dim()][: 1 + flag] if a.dim() > 1 else dim, flag)
    mask = MASKS[which % len(MASKS)](pool[first % EXACT], pool[second % EXACT])
    return torch.where(mask, c, a) if flag else mask * a


def possible(pool: list[Tensor], program: list[Stage]) -> list[Stage]:
    """The stages whose operands fit each other."""
    pool, kept = list(pool), []
    for stage in program:
        with suppress(RuntimeError, IndexError, ZeroDivisionError):
            tensor = made(pool, stage)
            if 0 < tensor.numel() <= 400:
                pool.append(tensor)
                kept.append(stage)
    return kept


def stepped(program: list[Stage]) -> Callable[..., list[Tensor]]:
    def step(*inputs: Tensor) -> list[Tensor]:
        x, *_ = pool = list(inputs)
        for stage in program:
            pool.append(made(pool, stage))
        return [x + 0.1 * sum(part.mean() for part in pool[1:]).tanh(), *pool[EXACT:]]

    return step


@pytest.mark.parametrize(
    "dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=["float32", "float64"]
)
@few
@given(shapes, shapes, st.integers(1, 9), stages, st.integers(0, 2**32 - 1))
def test_random_steps_are_torchs(
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
    shared: tuple[int, ...],
    varying: tuple[int, ...],
    size: int,
    program: list[Stage],
    seed: int,
) -> None:
    stream = torch.Generator().manual_seed(seed)
    x, own = (torch.randn(CLIENTS, size, generator=stream, dtype=dtype) for _ in range(2))
    common = torch.randn(shared, generator=stream, dtype=dtype).round(decimals=1)
    data = torch.randn(CLIENTS * STEPS, *varying, generator=stream, dtype=dtype).round(decimals=1)
    step = stepped(possible([x[:1], own[:1], common, data[0]], program))
    models, left = [], []
    for c in range(CLIENTS):
        at = x[c : c + 1]
        for s in range(STEPS):
            at, *results = step(at, own[c : c + 1], common, data[c * STEPS + s])
            left.append(results)
        models.append(at)
    expected = [*(torch.stack(part) for part in zip(*left, strict=True)), torch.cat(models)]
    monkeypatch.setattr(build, "_FLAGS", ["-O2", *build._FLAGS[1:]])
    try:
        code = Steps(step, [x[:1], own[:1]], [common], [data[0]])
    except NoCodeError as error:
        pytest.fail(f"all operators are supported: {error}")
    found = [*code([x, own], [common], [data], np.full(CLIENTS, STEPS)), x]
    tolerance = torch.finfo(dtype).eps * 1e4
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
