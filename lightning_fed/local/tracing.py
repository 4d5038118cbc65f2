"""Record a function as a graph of operators."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from torch import Tensor
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
    # One FakeTensorMode for all operators would take half the time, but to enter it registers a device, after which
    # autograd starts threads with the first backward pass, and workers can no longer be forked.
    recorded: GraphModule = make_fx(function, decomposition_table=dict(decompositions or {}))(*inputs)
    return recorded
