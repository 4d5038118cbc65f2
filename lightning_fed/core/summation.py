"""Sum by a fixed binary tree, so that every engine gets the same bits."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.records import tree_map, wide


class TreeSum:
    """The weighted sum of messages by position, in float64, by a fixed binary tree.

    Positions 2j and 2j + 1 are added first, then pairs of pairs, and so on; a node without a partner moves up
    unchanged. The tree depends on positions alone, so that messages may be summed one by one, in stacks, or in
    other processes.

    >>> total = TreeSum()
    >>> total.add(torch.tensor([[1e16], [1.0]]), [1.0, 1.0])
    >>> total.add(torch.tensor([[1.0], [-1e16]]), [1.0, 1.0])
    >>> total.value()  # (1e16 + 1) + (1 - 1e16), where each 1 is lost
    tensor([0.], dtype=torch.float64)
    """

    def __init__(self) -> None:
        self._count = 0
        self._nodes: list[tuple[int, Any]] = []  # sums of 2**level messages each, from left to right

    def add(self, stacked: Any, weights: Sequence[float | None]) -> None:
        """Add the messages of the next positions, stacked (k, ...); a message with weight None counts as zero."""
        first = 0
        while first < len(weights):
            size = _largest_block(self._count, len(weights) - first)
            block = slice(first, first + size)
            own = weights[block]
            self._push(size.bit_length() - 1, tree_map(lambda leaf, b=block, w=own: _pairwise(leaf[b], w), stacked))
            self._count, first = self._count + size, first + size

    def _push(self, level: int, node: Any) -> None:
        while self._nodes and self._nodes[-1][0] == level:
            level, node = level + 1, tree_map(Tensor.add_, self._nodes.pop()[1], node)
        self._nodes.append((level, node))

    def value(self) -> Any:
        """The sum over all positions; needs at least one position."""
        (_, total), *rest = reversed(self._nodes)
        for _, node in rest:
            total = tree_map(torch.add, node, total)
        return total


def _largest_block(position: int, room: int) -> int:
    """The largest number of positions, a power of two, that form one node of the tree starting at ``position``."""
    most = 1 << (room.bit_length() - 1)
    return min(most, position & -position) if position else most


def _pairwise(rows: Tensor, weights: Sequence[float | None]) -> Tensor:
    """The weighted sum of 2**level rows; rounds products before adding, as not every machine has fused multiply-add."""
    if len(rows) == 1:
        return torch.zeros_like(wide(rows[0])) if weights[0] is None else wide(rows[0]) * weights[0]
    factors = wide(rows).new_tensor([0.0 if weight is None else weight for weight in weights])
    nodes = wide(rows) * factors.view(-1, *[1] * (rows.ndim - 1))
    missing = [i for i, weight in enumerate(weights) if weight is None]
    if missing:
        nodes[missing] = 0.0
    while len(nodes) > 1:
        nodes = nodes[::2] + nodes[1::2]
    return nodes[0]
