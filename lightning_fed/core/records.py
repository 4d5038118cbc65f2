"""Records: frozen dataclasses of tensors, and arithmetic on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from torch import Tensor
from torch.utils import _pytree as pytree
from typing_extensions import dataclass_transform

T = TypeVar("T")


@dataclass_transform(frozen_default=True)
def record(cls: type[T]) -> type[T]:
    """Frozen dataclass of tensors that torch's transforms see as a tree.

    >>> import torch
    >>> @record
    ... class Pair:
    ...     a: Tensor
    ...     b: Tensor
    >>> tree_map(lambda x: 2 * x, Pair(torch.ones(1), torch.zeros(1))).a
    tensor([2.])
    """
    frozen = dataclass(frozen=True, eq=False)(cls)
    pytree.register_dataclass(frozen)
    return frozen


def tree_map(function: Callable[..., Any], tree: T, *others: T) -> T:
    """A record of ``function`` of the tensors of records of the same shape.

    Torch's own tree map knows more kinds of trees; thousands of clients make its speed matter.
    """
    if isinstance(tree, Tensor):
        mapped: T = function(tree, *others)
    elif dataclasses.is_dataclass(tree):
        parts = zip(*(vars(each).values() for each in (tree, *others)), strict=True)
        kind: Any = type(tree)
        mapped = kind(*(tree_map(function, *part) for part in parts))
    else:
        mapped = pytree.tree_map(function, tree, *others)
    return mapped


def leaves_of(tree: object) -> list[Tensor]:
    """The tensors of a record."""
    return [leaf for leaf in pytree.tree_leaves(tree) if isinstance(leaf, Tensor)]


def wide(x: Tensor) -> Tensor:
    """``x`` in the precision sums are kept in: float64, so that a sum of thousands of deltas does not drift."""
    return x if x.device.type == "mps" else x.double()


def num_bytes(tree: object) -> int:
    """Bytes a record takes on the wire: scalars times their size."""
    return sum(t.numel() * t.element_size() for t in leaves_of(tree))
