"""A few samples of a few clients, to find out whether two processes have the same data."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256
from typing import Any

import numpy as np
from torch.utils.data import Subset

from lightning_fed.core.memory import ClientId
from lightning_fed.data.tensor_loader import in_memory

#: Clients that are looked at, and samples of each.
CLIENTS, SAMPLES = 100, 10


def sketch(data: Any, ids: Sequence[ClientId]) -> dict[ClientId, str]:
    """Digests of some training samples of some clients; of samples that are not in memory, of their numbers alone.

    Data that were dealt out with another seed have other digests, even if all clients have as many samples.
    """
    chosen = [ids[i] for i in spread(len(ids), CLIENTS)]
    return {cid: found for cid in chosen if (found := _digest(data.client_dataset(cid))) is not None}


def spread(n: int, most: int) -> list[int]:
    """At most so many of the first n numbers, evenly spread.

    >>> spread(3, 10), spread(10, 4)
    ([0, 1, 2], [0, 3, 6, 9])
    """
    return sorted({int(i) for i in np.linspace(0, n - 1, min(n, most))})


def _digest(dataset: Any) -> str | None:
    if (memory := in_memory(dataset)) is not None:
        tensors, rows, _ = memory
        places = spread(len(tensors[0] if rows is None else rows), SAMPLES)
        places = places if rows is None else [int(rows[i]) for i in places]
        parts = [part[places].detach().cpu().contiguous().numpy().tobytes() for part in tensors]
    elif type(dataset) is Subset:
        parts = [np.asarray(dataset.indices, dtype=np.int64).tobytes()]
    else:  # reading may be slow, and draw from a random generator
        return None
    return sha256(b"".join(parts)).hexdigest()[:8]
