"""Functions of stacked tensors, recorded once and replayed with little Python; compiled where that is wanted."""

from __future__ import annotations

import copy
import logging
import warnings
from collections.abc import Callable, Hashable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.func import functionalize
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.local.parts import Parts
from lightning_fed.local.simplify import is_pure, simplified
from lightning_fed.native.steps import Steps

log = logging.getLogger(__name__)

#: Recorded functions that are kept.
KEPT = 32

#: Steps that are written in C: more are settings that change all the time, and a compiler would only hold them up.
IN_C = 8
#: Clients and steps that are compared with what was recorded.
FEW = 3

Graph = Callable[..., Sequence[Tensor]]


class Graphs:
    """Recorded functions by key and shape of their inputs.

    Args:
        compile: make machine code of steps. The first result of each is compared with the recorded function's; one that
            does not compile or differs is replayed as it was recorded.
    """

    def __init__(self, compile: bool) -> None:
        self.compile = compile
        self._parts: dict[Hashable, Parts] = {}
        self._compiled: dict[Hashable, Graph | None] = {}
        self._in_c: dict[Hashable, Steps | None] = {}

    def parts(self, key: Hashable, function: Graph, *inputs: Sequence[Tensor]) -> Parts:
        """A step for parameters, shared tensors and data of this shape; ``key`` tells apart what they do not."""
        whole = key, tuple(map(len, inputs)), _shapes([t for kind in inputs for t in kind])
        if whole not in self._parts:
            # plain tensors: those made in inference mode cannot be differentiated
            with torch.inference_mode(False), torch.no_grad():
                _keep(self._parts, whole, _taken_apart(function, [[_copy(t) for t in kind] for kind in inputs]))
        return self._parts[whole]

    def compiled(self, key: Hashable, function: Graph, inputs: Sequence[Tensor]) -> Graph | None:
        """Machine code for inputs of this shape, of a function that may write into them; None if there is none."""
        whole = key, _shapes(inputs)
        if self.compile and whole not in self._compiled:
            with torch.inference_mode(False), torch.no_grad():
                _keep(self._compiled, whole, _compiled(function, inputs))
        return self._compiled.get(whole)

    def in_c(
        self,
        key: Hashable,
        function: Graph,
        client: Sequence[Tensor],
        shared: Sequence[Tensor],
        varying: Sequence[Tensor],
    ) -> Steps | None:
        """All steps of all clients at once, as :class:`Steps` takes them; None if there is no such code.

        The first steps of the first clients are compared with the function's.
        """
        examples = [*(t[0] for t in client), *shared, *(t[0] for t in varying)]  # however they lie in memory
        whole = key, len(client), len(shared), tuple((t.shape, t.dtype) for t in examples)
        if whole not in self._in_c and len(self._in_c) < IN_C:
            with torch.inference_mode(False), torch.no_grad():
                self._in_c[whole] = _in_c(function, client, shared, varying)
        return self._in_c.get(whole)


def _keep(made: dict[Hashable, Any], key: Hashable, value: Any) -> None:
    """Beside the latest others: a setting that changes in every round makes a new one each time."""
    while len(made) >= KEPT:
        del made[next(iter(made))]
    made[key] = value


def _taken_apart(function: Graph, inputs: Sequence[Sequence[Tensor]]) -> Parts:
    counts, flat = [len(kind) for kind in inputs], [t for kind in inputs for t in kind]
    recorded = make_fx(function)(*flat)
    try:
        whole = copy.deepcopy(recorded) if is_pure(recorded.graph) else make_fx(functionalize(function))(*flat)
        parts = Parts(simplified(whole, flat), counts)
        with warnings.catch_warnings():
            warnings.filterwarnings("error", message="There is a performance drop")
            _compare(parts, recorded, *inputs)
    except Exception as error:
        log.info("Steps are replayed as recorded: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return Parts(recorded, counts, apart=False)
    return parts


def _compare(
    parts: Parts, recorded: Graph, params: Sequence[Tensor], shared: Sequence[Tensor], data: Sequence[Tensor]
) -> None:
    """Two steps in parts and as a whole."""
    steps = [data, [part.flip(0) for part in data]]
    expected = [recorded(*params, *shared, *step) for step in steps]
    prepared = parts.before(shared, [torch.stack(pair) for pair in zip(*steps, strict=True)])
    views, fed = parts.views(*params), parts.fed(prepared)
    found = [parts.step(*views, *shared, *(part[t] for part in fed)) for t in range(2)]
    left = [torch.stack(pair) for pair in list(zip(*found, strict=True))[1:]]
    rest = parts.after(left, shared, prepared)
    for t in range(2):
        for ours, theirs in zip([found[t][0], *(part[t] for part in rest)], expected[t], strict=True):
            torch.testing.assert_close(ours, theirs, equal_nan=True)


def _compiled(function: Graph, inputs: Sequence[Tensor]) -> Any:
    ours, theirs = [_copy(t) for t in inputs], [_copy(t) for t in inputs]
    try:
        compiled: Any = torch._inductor.compile(make_fx(function)(*map(_copy, inputs)), list[Any](ours))
        expected = function(*theirs)
        torch.testing.assert_close([*compiled(*ours), *ours], [*expected, *theirs], equal_nan=True)
    except Exception as error:
        log.info("Local steps are not compiled: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return None
    return compiled


def _in_c(function: Graph, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]) -> Any:
    m, count = len(client[0]), len(varying[0]) // len(client[0])
    own = [rows[:FEW].clone() for rows in client]
    steps = [part.view(m, count, *part.shape[1:])[:FEW, :FEW].clone() for part in varying]
    try:
        code = Steps(function, [rows[:1] for rows in own], [_copy(t) for t in shared], [part[0, 0] for part in steps])
        each = range(len(own[0]))
        expected = [_one_by_one(function, [t[[i]] for t in own], shared, [part[i] for part in steps]) for i in each]
        found = [*code(own, shared, [part.flatten(0, 1) for part in steps]), own[0]]
        torch.testing.assert_close(found, [torch.cat(part) for part in zip(*expected, strict=True)], equal_nan=True)
    except Exception as error:
        log.info("Local steps are not written in C: %s: %s", type(error).__name__, str(error).split("\n")[0])
        return None
    return code


def _one_by_one(
    function: Graph, client: Sequence[Tensor], shared: Sequence[Tensor], varying: Sequence[Tensor]
) -> list[Tensor]:
    """Results (T, ...) of one client's steps, and where they led."""
    x, *rest = client
    results = []
    for own in zip(*varying, strict=True):
        x, *left = function(x, *rest, *shared, *own)
        results.append(left)
    return [*(torch.stack(part) for part in zip(*results, strict=True)), x]


def _shapes(tensors: Sequence[Tensor]) -> Hashable:
    return tuple((t.shape, t.stride(), t.dtype, t.device) for t in tensors)


def _copy(tensor: Tensor) -> Tensor:
    """With the same strides, also where they are 0."""
    twin = torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)
    once = tuple(slice(None) if stride else slice(1) for stride in tensor.stride())
    twin[once] = tensor[once]
    return twin
