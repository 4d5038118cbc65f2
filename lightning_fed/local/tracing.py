"""Record a function as a graph of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch._guards import TracingContext, tracing
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx


def trace(
    function: Callable[..., Any],
    inputs: Sequence[Tensor],
    decompositions: Mapping[Any, Callable[..., Any]] | None = None,
) -> GraphModule:
    """The operators that ``function`` applies to ``inputs``.

    >>> import torch
    >>> [node.name for node in trace(lambda x: x.exp() + 1, [torch.zeros(2)]).graph.nodes][1:-1]
    ['exp', 'add']
    """
    _start_autograd()
    # One mode describes all tensors: by itself, make_fx makes one per operator, which takes half the time.
    with tracing(TracingContext(FakeTensorMode(allow_fallback_kernels=True))):
        recorded: GraphModule = make_fx(function, decomposition_table=dict(decompositions or {}))(*inputs)
    for node in recorded.graph.nodes:
        if node.op == "get_attr":  # a constant, which make_fx of torch 2.7 does not describe
            node.meta.setdefault("val", getattr(recorded, str(node.target)))
    return recorded


@cache
def _start_autograd() -> None:
    """Have autograd decide about its threads before anything is recorded.

    It does so with the first backward pass of a process, by the devices that there are. Recording registers one where
    there is none, and after a backward pass with threads a process can no longer be forked for workers.
    """
    with torch.enable_grad():
        torch.zeros((), requires_grad=True).backward()  # type: ignore[no-untyped-call]
