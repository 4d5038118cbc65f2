"""The batches of a visit by docs/draws.md, from NumPy's own Philox: an implementation beside the product's."""

from __future__ import annotations

from collections.abc import Iterator
from hashlib import sha256
from typing import Any

import numpy as np
from torch import Tensor
from torch.utils.data import default_collate

from lightning_fed import FederatedDataModule
from lightning_fed.core.randomness import seed_global


def order(seed: int, round: int, client: int | str, epoch: int, samples: int) -> list[int]:
    """The order of a client's samples in a local epoch."""
    key = int.from_bytes(sha256(repr((seed, client, "batches")).encode()).digest()[:16], "big")
    words = ((key >> 64), key & (2**64 - 1))
    counter = (round << 128) + (epoch << 64)
    drawn = np.random.Philox(counter=(counter - 1) % 2**256, key=words[0] + (words[1] << 64))
    values = drawn.random_raw(4 * -(-samples // 4))[:samples]
    return sorted(range(samples), key=lambda i: int(values[i]))


def positions(
    seed: int, round: int, client: int | str, samples: int, size: int, steps: int | None = None
) -> list[list[int]]:
    """Positions of the samples of each batch: of so many steps, or of one epoch."""
    if steps is None:
        whole = order(seed, round, client, 0, samples)
        return [whole[i : i + size] for i in range(0, samples, size)]
    size = min(size, samples)
    epochs = -(-steps * size // samples)
    stream = [i for epoch in range(epochs) for i in order(seed, round, client, epoch, samples)]
    return [stream[t * size : (t + 1) * size] for t in range(steps)]


def batches(
    data: FederatedDataModule, client: Any, seed: int, round: int, steps: int | None = None
) -> Iterator[list[Tensor]]:
    """The batches themselves; before the first one that begins in an epoch, the global streams are seeded."""
    dataset: Any = data.client_dataset(client)
    begun, epoch = 0, -1
    for rows in positions(seed, round, client, len(dataset), data.batch_size, steps):
        if begun // len(dataset) > epoch:
            epoch = begun // len(dataset)
            seed_global(seed, round, client, epoch)
        yield default_collate([dataset[i] for i in rows])
        begun += len(rows)
