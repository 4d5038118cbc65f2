"""Remove operators without effect from recorded graphs, because each one costs microseconds in every step."""

from __future__ import annotations

import copy
import operator
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.fx import Graph, GraphModule, Node

from lightning_fed.local.native.codegen.views import VIEWS
from lightning_fed.local.tracing import trace

aten = torch.ops.aten

_COPIES = {aten.clone.default, aten._to_copy.default, aten.lift_fresh_copy.default}
#: Operators whose results depend only on the shapes of their tensors.
_BY_SHAPE = {
    aten.ones_like.default,
    aten.zeros_like.default,
    aten.full_like.default,
    aten.new_zeros.default,
    aten.new_ones.default,
    aten.new_full.default,
}


def simplified(recorded: GraphModule, inputs: Sequence[Tensor]) -> GraphModule:
    """Return the same function with fewer operators, for a graph of pure operators."""
    drop_factors(recorded)
    recorded.recompile()
    recorded = trace(recorded, inputs)  # record again, because dropped factors change strides
    drop_identities(recorded)
    fold_constants(recorded)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    return recorded


def is_pure(graph: Graph) -> bool:
    """Whether every operator writes into no tensor and draws no random numbers."""
    return all(
        node.target is operator.getitem
        or (
            isinstance(node.target, torch._ops.OpOverload)
            and not node.target._schema.is_mutable
            and torch.Tag.nondeterministic_seeded not in node.target.tags
        )
        for node in operators(graph)
    )


def operators(graph: Graph) -> list[Any]:
    """The nodes that call an operator; as Any, because the types of their arguments depend on the operator."""
    return [node for node in graph.nodes if node.op == "call_function"]


def drop_factors(recorded: GraphModule) -> None:
    """Drop products with the number 1; strides may then differ from the recorded ones."""
    for node in operators(recorded.graph):
        if (
            node.target in (aten.mul.Scalar, aten.mul.Tensor)
            and node.args[1] == 1
            and _dtype(node) == _dtype(node.args[0])
        ):
            node.replace_all_uses_with(node.args[0])


def fold_constants(recorded: GraphModule) -> None:
    """Compute tensors that are the same in every step once, and store them as buffers of the graph."""
    known: dict[Node, Tensor] = {}
    for node in operators(recorded.graph):
        used = node.all_input_nodes
        if node.target not in _BY_SHAPE and any(part not in known for part in used):
            continue
        values = {part: known[part] if part in known else _empty(part.meta["val"]) for part in used}
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), values.__getitem__)
        known[node] = node.target(*args, **kwargs)
    for node, value in known.items():
        if any(user not in known for user in node.users):
            name = f"constant_{node.name}"
            recorded.register_buffer(name, value, persistent=False)
            with recorded.graph.inserting_before(node):
                kept = recorded.graph.get_attr(name)
            kept.meta = dict(node.meta)
            node.replace_all_uses_with(kept)


def drop_identities(recorded: GraphModule) -> None:
    """Drop views that change nothing, and copies, which a pure graph never writes to."""
    for node in operators(recorded.graph):
        if node.target in VIEWS | _COPIES and _same(node, node.args[0]):
            node.replace_all_uses_with(node.args[0])


def bound(graph: GraphModule) -> Callable[..., Any]:
    """Replace operators by torch's Python functions, which are faster to call."""
    quick = GraphModule(graph, copy.deepcopy(graph.graph))
    for node in operators(quick.graph):
        name = getattr(node.target, "_opname", "")
        function = getattr(torch._C._VariableFunctions, name, None) if not name.endswith("_like") else None
        if node.target in (aten.view.default, aten._unsafe_view.default):
            node.op, node.target = "call_method", "view"
        elif function is not None and not name.startswith("new_"):  # Python's new_* and *_like take other arguments
            node.target = function
    quick.recompile()
    forward: Callable[..., Any] = quick.forward
    return forward


def _empty(like: Tensor) -> Tensor:
    """An empty tensor with the shape and strides of a recorded one, which may be fake and without memory."""
    return torch.empty_strided(like.shape, like.stride(), dtype=like.dtype, device=like.device)


def _same(node: Node, other: Any) -> bool:
    """Whether two nodes are tensors with the same shape, strides, type and device; numbers are not compared."""
    if not isinstance(other, Node):
        return False
    a, b = node.meta["val"], other.meta["val"]
    return (a.shape, _strides(a), a.dtype, a.device) == (b.shape, _strides(b), b.dtype, b.device)


def _strides(tensor: Tensor) -> list[int]:
    """Strides of the dimensions with more than one entry; the others have no effect."""
    return [stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size != 1]


def _dtype(node: Any) -> torch.dtype:
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype
