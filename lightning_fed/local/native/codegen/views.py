"""Operators whose results share memory with their inputs."""

from __future__ import annotations

import operator

import torch
from torch.fx import Node

aten = torch.ops.aten

#: Operators that return the same numbers in another shape, at the same address.
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
    """Whether a node's tensor may share memory with its inputs."""
    if node.target in VIEWS or node.target is operator.getitem:
        return True
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(result.alias_info is not None for result in schema.returns)
