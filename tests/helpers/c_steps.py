"""Steps in C beside the same steps in torch."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import pytest
import torch
from numpy.typing import NDArray
from torch import Tensor

from helpers.marks import quick_first
from lightning_fed.core.compiler import find_compiler
from lightning_fed.local.native.codegen.program import Steps

Step = Callable[..., list[Tensor]]
Lengths = NDArray[np.int64]

needs_compiler = pytest.mark.skipif(find_compiler() is None, reason="there is no C compiler")
each_precision = pytest.mark.parametrize(
    "dtype", quick_first([torch.float64, torch.float32]), ids=["float64", "float32"]
)


def evenly(client: Sequence[Tensor], varying: Sequence[Tensor]) -> Lengths:
    """As many steps for every client."""
    return np.full(len(client[0]), len(varying[0]) // len(client[0]))


def one_by_one(
    step: Step,
    client: Sequence[Tensor],
    shared: Sequence[Tensor],
    varying: Sequence[Tensor],
    lengths: Lengths | None = None,
) -> list[Tensor]:
    """What the steps of all clients leave, and the models they lead to."""
    lengths, models, left = evenly(client, varying) if lengths is None else lengths, [], []
    for c, count in enumerate(lengths):
        x, *rest = (t[c : c + 1] for t in client)
        first = int(lengths[:c].sum())
        for own in zip(*(part[first : first + count] for part in varying), strict=True):
            x, *results = step(x, *rest, *shared, *own)
            left.append(results)
        models.append(x)
    return [*(torch.stack(part) for part in zip(*left, strict=True)), torch.cat(models)]


def in_c(
    step: Step,
    client: Sequence[Tensor],
    shared: Sequence[Tensor],
    varying: Sequence[Tensor],
    lengths: Lengths | None = None,
) -> list[Tensor]:
    x, lengths = client[0].clone(), evenly(client, varying) if lengths is None else lengths
    code = Steps(step, [t[:1] for t in client], shared, [part[0] for part in varying])
    return [*code([x, *client[1:]], shared, varying, lengths), x]


def agree(
    step: Step,
    client: Sequence[Tensor],
    shared: Sequence[Tensor],
    varying: Sequence[Tensor],
    lengths: Lengths | None = None,
) -> None:
    expected = one_by_one(step, client, shared, varying, lengths)
    found = in_c(step, client, shared, varying, lengths)
    torch.testing.assert_close(found, expected, equal_nan=True)


def assert_promised(ours: Tensor, theirs: Tensor, *inputs: Tensor) -> None:
    """Compare what C code promises: torch's numbers on finite inputs; what torch makes non-finite stays non-finite.

    On infinite inputs torch's own kernels differ between processors: gelu(inf) is inf on one and nan on another.
    """
    given = [t for t in inputs if t.shape == theirs.shape and t.is_floating_point()]
    infinite = torch.stack([~t.isfinite() for t in given]).any(0) if given else torch.zeros_like(theirs, dtype=bool)
    assert not bool((infinite & ours.isfinite() & ~theirs.isfinite()).any())
    compared = ~infinite | (ours.isfinite() & theirs.isfinite())
    torch.testing.assert_close(ours[compared], theirs[compared], equal_nan=True)


def agree_each(functions: dict[str, Callable[..., Tensor]], *inputs: Tensor, dtype: torch.dtype) -> None:
    """Functions of the same inputs, all in one step; every one that differs is named."""
    x, varying = torch.zeros(1, 1, dtype=dtype), [t.unsqueeze(0) for t in inputs]

    def step(x: Tensor, *own: Tensor) -> list[Tensor]:
        return [x, *(function(*own) for function in functions.values())]

    wrong = []
    *found, _ = in_c(step, [x], [], varying)
    for (name, function), ours in zip(functions.items(), found, strict=True):
        try:
            assert_promised(ours[0], function(*inputs), *inputs)
        except AssertionError:
            wrong.append(f"{name}: {ours[0].tolist()} is not {function(*inputs).tolist()}")
    assert not wrong, "\n".join(wrong)
