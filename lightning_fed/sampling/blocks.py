"""Draw one of several blocks of clients, such as a region or a rack."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.validation import is_whole
from lightning_fed.sampling.base import Sampler, freeze_client_sets, refuse_strangers


@dataclass(frozen=True)
class Blocks(Sampler):
    """Draws one of ``m`` non-overlapping blocks, uniformly: every client has probability 1/m.

    Among online clients: blocks lose the clients that are away; one of the nonempty blocks is drawn, uniformly.

    Args:
        blocks: lists of client indices; or the number of blocks, made of neighbouring clients and as equal as possible.

    >>> Blocks([[0, 2], [1, 3, 4]]).inclusion_probabilities(5)
    array([0.5, 0.5, 0.5, 0.5, 0.5])
    >>> Blocks(3).partition(7)
    ((0, 1, 2), (3, 4), (5, 6))
    """

    blocks: int | Sequence[Sequence[int]]

    def __post_init__(self) -> None:
        if isinstance(self.blocks, (int, float)):
            if not is_whole(self.blocks) or self.blocks < 1:
                raise ValueError(f"Blocks.blocks must be a whole number >= 1 or a list of lists, got {self.blocks!r}.")
            return
        freeze_client_sets(self, "blocks")
        if not self.blocks:
            raise ValueError("Blocks.blocks must have at least one block, got none.")
        seen: set[int] = set()
        for number, block in enumerate(self.blocks):
            if not block:
                raise ValueError(f"Blocks.blocks must not be empty, got block {number} without clients. Leave it out.")
            for i in block:
                if i in seen:
                    raise ValueError(f"Blocks.blocks must not overlap, got client {i} twice. Put it into one block.")
                seen.add(i)

    def partition(self, n: int) -> tuple[tuple[int, ...], ...]:
        """The blocks of ``n`` clients; refuse blocks that leave out a client."""
        if isinstance(self.blocks, int):
            if self.blocks > n:
                raise ValueError(f"Cannot make {self.blocks} blocks of {n} clients. Use at most {n}.")
            return tuple(tuple(part.tolist()) for part in np.array_split(np.arange(n), self.blocks))
        clients = sorted(i for block in self.blocks for i in block)
        refuse_strangers(self, "blocks", clients, n)
        left_out = next((i for i in range(n) if i >= len(clients) or clients[i] != i), None)
        if left_out is not None:
            raise ValueError(
                f"Blocks.blocks never draws client {left_out} of {n}: not a proper sampling. Put it into a block."
            )
        return tuple(tuple(block) for block in self.blocks)

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return np.full(n, 1 / len(self.partition(n)))

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        blocks = self.partition(n)
        return list(blocks[rng.integers(len(blocks))])

    def among(self, online: Sequence[int], n: int) -> Blocks:
        position = {i: j for j, i in enumerate(online)}
        left = ([position[i] for i in block if i in position] for block in self.partition(n))
        return Blocks([block for block in left if block])
