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
    """Apply ``function`` to the corresponding tensors of records of the same shape; returns such a record.

    Torch's tree map handles more kinds of trees, but is too slow for thousands of clients; only other trees go to it.
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


def wide(x: Tensor) -> Tensor:
    """Convert ``x`` to float64, the precision of sums, so that a sum of thousands of deltas does not drift."""
    return x if x.device.type == "mps" else x.double()


def num_bytes(tree: object) -> int:
    """Bytes that a record takes when sent: number of entries times their size."""
    return sum(t.numel() * t.element_size() for t in pytree.tree_leaves(tree) if isinstance(t, Tensor))
