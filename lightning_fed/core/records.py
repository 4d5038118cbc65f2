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

    >>> import torch
    >>> from lightning_fed.core import Broadcast
    >>> tree_map(torch.add, Broadcast(torch.tensor([1.0])), Broadcast(torch.tensor([2.0]))).x_bar
    tensor([3.])
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
    """Convert ``x`` to float64, the precision of sums, so that a sum of thousands of deltas does not drift.

    >>> import torch
    >>> wide(torch.ones(1, dtype=torch.float16)).dtype
    torch.float64
    """
    return x if x.device.type == "mps" else x.double()


def num_bytes(tree: object) -> int:
    """Bytes that a record takes when sent: number of entries times their size.

    >>> import torch
    >>> from lightning_fed.core import Broadcast
    >>> num_bytes(Broadcast(torch.zeros(1000)))  # float32
    4000
    """
    return sum(t.numel() * t.element_size() for t in leaves_of(tree))
