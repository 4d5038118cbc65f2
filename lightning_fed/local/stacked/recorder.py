"""Record functions of stacked tensors once, and replay them with little Python, or in C."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from subprocess import SubprocessError
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.func import functionalize

from lightning_fed.lightning import rank_zero_info
from lightning_fed.local.native.codegen.lowering import NoCodeError
from lightning_fed.local.native.codegen.program import Steps
from lightning_fed.local.stacked.phases import Parts
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.local.stacked.simplify import is_pure, simplified
from lightning_fed.local.tracing import trace

Numbers = NDArray[np.int64]

#: Maximum number of recorded functions in memory.
KEPT = 64
#: Errors after which recorded steps run instead of C code: unknown operators or types, a missing or failing compiler,
#: steps that cannot be traced, results that differ.
NO_CODE = (NoCodeError, KeyError, AttributeError, OSError, SubprocessError, RuntimeError, AssertionError)
#: Number of clients, and of steps of each, for which C code is compared with recorded steps.
FEW = 3

Function = Callable[..., Sequence[Tensor]]

#: functionalize turns writing into a tensor into this operator, for which vmap has no rule.
_PLAIN_COPIES = {torch.ops.aten.copy.default: lambda to, source, _=False: source.to(to.dtype).expand(to.shape).clone()}


class Graphs:
    """Recorded functions by the shapes of their inputs, and the C code generated from them."""

    def __init__(self) -> None:
        self._parts: dict[Hashable, Parts] = {}
        self._in_c: dict[Hashable, Steps | None] = {}

    def parts(self, function: Function, *inputs: Sequence[Tensor]) -> Parts:
        """Return a recorded step for parameters, shared tensors and data of these shapes."""
        whole = tuple(map(len, inputs)), _shapes([t for kind in inputs for t in kind])
        if whole not in self._parts:
            # outside inference mode, because tensors made in it cannot be differentiated
            with torch.inference_mode(False), torch.no_grad():
                _keep(self._parts, whole, _taken_apart(function, [[_copy(t) for t in kind] for kind in inputs]))
        return self._parts[whole]

    def in_c(
        self,
        key: Hashable,
        function: Function,
        lengths: Numbers,
        client: Sequence[Tensor],
        shared: Sequence[Tensor],
        varying: Sequence[Tensor],
    ) -> Steps | None:
        """C code for all steps of all clients, with the arguments of :class:`Steps`; None if there is none.

        New code is compared with the function on the first steps of the first clients.
        """
        examples = [*(t[0] for t in client), *shared, *(t[0] for t in varying)]
        # strides are not part of the key, because Steps makes its inputs contiguous
        whole = key, len(client), len(shared), tuple((t.shape, t.dtype) for t in examples)
        if whole not in self._in_c:
            with torch.inference_mode(False), torch.no_grad():
                code = _in_c(function, lengths, client, shared, varying)
            if code is not None and not any(self._in_c.values()):
                rank_zero_info("Local steps run in C.")
            _keep(self._in_c, whole, code)
        return self._in_c[whole]


def _keep(made: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Store a value; drop the oldest one if there are too many."""
    while len(made) >= KEPT:
        del made[next(iter(made))]
    made[key] = value


def _taken_apart(function: Function, inputs: Sequence[Sequence[Tensor]]) -> Parts:
    """Record a function and split it into phases; raises `UnfitError` if that would change its results."""
    counts, flat = [len(kind) for kind in inputs], [t for kind in inputs for t in kind]
    # functionalize: a step may write into tensors that it made itself; recorded, such writes make new tensors
    recorded = trace(functionalize(function), flat, _PLAIN_COPIES)
    if not is_pure(recorded.graph):
        raise UnfitError("a step draws random numbers, or changes tensors that are not its own")
    parts = Parts(simplified(recorded, flat), counts)
    try:
        _compare(parts, function, *inputs)
    except AssertionError as error:
        raise UnfitError(f"a recorded step has other results: {error}") from error
    return parts


def _compare(
    parts: Parts, function: Function, params: Sequence[Tensor], shared: Sequence[Tensor], data: Sequence[Tensor]
) -> None:
    """Compare two steps, taken in phases, with the function itself."""
    # the second step has other data than the recorded one: values that the recording froze by mistake would differ
    steps = [data, [part.flip(0) for part in data]]
    expected = [function(*params, *shared, *step) for step in steps]
    prepared = parts.before(shared, [torch.stack(pair) for pair in zip(*steps, strict=True)])
    views, fed = parts.views(*params), parts.fed(prepared)
    found = [parts.step(*views, *shared, *(part[t] for part in fed)) for t in range(2)]
    left = [torch.stack(pair) for pair in list(zip(*found, strict=True))[1:]]
    rest = parts.after(left, shared, prepared)
    for t in range(2):
        for ours, theirs in zip([found[t][0], *(part[t] for part in rest)], expected[t], strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def _in_c(
    function: Function, lengths: Numbers, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]
) -> Steps | None:
    # copies, because C code updates models in place and the trial must not change the clients' models
    own, few = [rows[:FEW].clone() for rows in client], np.minimum(lengths[:FEW], FEW)
    begins = np.cumsum(lengths) - lengths
    steps = [[part[at : at + count].clone() for part in varying] for at, count in zip(begins, few, strict=False)]
    try:
        examples = [rows[:1] for rows in own], [_copy(t) for t in shared], [part[0] for part in steps[0]]
        code = Steps(function, *examples)
        expected = [_one_by_one(function, [t[[i]] for t in own], shared, part) for i, part in enumerate(steps)]
        found = [*code(own, shared, [torch.cat(part) for part in zip(*steps, strict=True)], few), own[0]]
        torch.testing.assert_close(found, [torch.cat(part) for part in zip(*expected, strict=True)], equal_nan=True)
    except NO_CODE as error:
        reason = f"{type(error).__name__}: {error}".split("\n")[0].rstrip(".")
        rank_zero_info(f"Local steps do not run in C, but as recorded: {reason}.")
        return None
    return code


def _one_by_one(
    function: Function, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]
) -> list[Tensor]:
    """Take one client's steps in Python; return their results (T, ...) and the final model."""
    x, *rest = client
    results = []
    for own in zip(*varying, strict=True):
        x, *left = function(x, *rest, *shared, *own)
        results.append(left)
    return [*(torch.stack(part) for part in zip(*results, strict=True)), x]


def _shapes(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def _copy(tensor: Tensor) -> Tensor:
    """Copy a tensor with the same strides, also strides of 0, so that the recorded graph fits the original."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    twin[once] = tensor[once]
    return twin
