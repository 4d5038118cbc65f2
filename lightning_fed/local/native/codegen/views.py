"""Operators whose results lie where their inputs lie."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

aten = torch.ops.aten

#: The same numbers in another shape, from the same place in memory on.
VIEWS = {
    aten.view.default,
    aten._unsafe_view.default,
    aten.expand.default,
    aten.unsqueeze.default,
    aten.squeeze.default,
    aten.squeeze.dim,
    aten.squeeze.dims,
    aten.transpose.int,
    aten.permute.default,
    aten.t.default,
    aten.alias.default,
    aten.detach.default,
}


def is_view(node: Node) -> bool:
    """Whether a node's tensor may lie where those it is made of lie."""
    if node.target in VIEWS or node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
