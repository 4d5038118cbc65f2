"""Passes over the weight of a large linear layer in C: forward, gradient of the inputs, and step.

Torch's operators read or write the weight seven times, and with a small batch memory traffic takes all the time.
"""

from __future__ import annotations

import ctypes
from functools import cache
from importlib.resources import files
from subprocess import SubprocessError
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.compiler import NoCompilerError, built
from lightning_fed.local.native.threads import spread

#: Batch sizes of the C functions; batches are filled up with zeros. Torch is faster for larger batches.
BATCHES = (1, 2, 4, 8)
#: Each thread gets a multiple of this number of columns or rows.
SHARE = 64

_SOURCES = ("linear.c", "linear.h")
_NUMBERS = {torch.float32: ctypes.c_float, torch.float64: ctypes.c_double}


def is_for_c(weight: Tensor, inputs: Tensor) -> bool:
    """Whether C is faster for a batch of this size, and the tensors lie in memory as C expects them."""
    plain = weight.device.type == "cpu" and weight.is_contiguous() and weight.dtype == inputs.dtype
    return plain and weight.dtype in _NUMBERS and 0 < len(inputs) <= BATCHES[-1] and defect() is None


@cache
def defect() -> str | None:
    """Why torch's operators are used instead of C; None if the C functions work."""
    try:
        _check()
    except NoCompilerError as error:
        return str(error)
    except SubprocessError as error:
        return f"the C compiler does not work: {error}"
    except (OSError, AttributeError, AssertionError) as error:
        return f"the compiled C library does not work: {error}"
    return None


def forward(weight: Tensor, x: Tensor) -> Tensor:
    """``x @ weight.T``."""
    x, batch = _filled(x), len(x)
    y = x.new_empty(len(x), len(weight))
    _call("forward", [weight, x, y], len(x), weight.shape[0])
    return y if len(y) == batch else y[:batch]


def backward(weight: Tensor, slopes: Tensor) -> Tensor:
    """``slopes @ weight``."""
    slopes, batch = _filled(slopes), len(slopes)
    dx = slopes.new_zeros(len(slopes), weight.shape[1])
    _call("backward", [weight, slopes, dx], len(slopes), weight.shape[1])
    return dx[:batch]


def move(weight: Tensor, target: Tensor | None, x: Tensor, slopes: Tensor, keep: float, pull: float, lr: float) -> None:
    """Set the weight to ``keep * weight + pull * target - lr * slopes.T @ x``, in place."""
    x, slopes = _filled(x), _filled(slopes)
    tensors = [weight, weight if target is None else target, x, slopes]
    _call("move", tensors, len(x), weight.shape[1], keep, 0.0 if target is None else pull, lr)
    torch.autograd.graph.increment_version(weight)  # autograd then refuses a backward pass that saved the old weight


def _filled(rows: Tensor) -> Tensor:
    size = next(size for size in BATCHES if size >= len(rows))
    if size == len(rows):
        return rows.contiguous()  # C computes the address of a row from the number of columns
    return torch.cat([rows, rows.new_zeros(size - len(rows), rows.shape[1])])


def _call(name: str, tensors: list[Tensor], batch: int, size: int, *numbers: float) -> None:
    """Call a function for all of ``size`` rows or columns of the first tensor, shared between threads."""
    function, at = _function(name, tensors[0].dtype), [tensor.data_ptr() for tensor in tensors]
    rows, columns = tensors[0].shape
    spread(lambda first, last: function(*at, batch, columns, rows, first, last, *numbers), size, SHARE)


@cache
def _function(name: str, dtype: torch.dtype) -> Any:
    function = getattr(built(_source(), portable=True), f"{name}_{str(dtype).removeprefix('torch.')}")
    tensors, numbers = (4, 3) if name == "move" else (3, 0)
    function.argtypes = [ctypes.c_void_p] * tensors + [ctypes.c_size_t] * 5 + [_NUMBERS[dtype]] * numbers
    function.restype = None
    return function


def _source() -> str:
    """The code with its header in place, so that the text alone identifies it in the cache."""
    code, header = (files("lightning_fed.local.native").joinpath(name).read_text("utf-8") for name in _SOURCES)
    return code.replace('#include "linear.h"', header)


def _check() -> None:
    """Compare the C functions with torch, because a compiler, or a library from the cache, may be wrong."""
    for dtype in _NUMBERS:
        weight, target = (torch.linspace(-1, 1, 7 * 37, dtype=dtype).sin().view(7, 37) * k for k in (1, 2))
        x, slopes = (torch.linspace(0, 3, 3 * n, dtype=dtype).cos().view(3, n) for n in (37, 7))
        expected = x @ weight.t(), slopes @ weight, 0.9 * weight + 0.1 * target - 0.5 * slopes.t() @ x
        found = forward(weight, x), backward(weight, slopes), weight
        move(weight, target, x, slopes, 0.9, 0.1, 0.5)
        for ours, theirs in zip(expected, found, strict=True):
            torch.testing.assert_close(ours, theirs)
