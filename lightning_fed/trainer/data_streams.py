"""Random generators that belong to a client's data."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import ModuleType
from typing import Any

import numpy as np
from torch import Tensor, nn

from lightning_fed.core.memory import ClientId
from lightning_fed.lightning import pl
from lightning_fed.trainer.notes import GLOBAL_STREAMS, STREAMS, Stream

#: Containers of a data set with more entries hold data, not random generators.
FEW = 100
#: Objects that hold no random generators of data.
OTHERS = (Tensor, np.ndarray, nn.Module, pl.Trainer, type, ModuleType)


def streams_of(data: Any, client: ClientId, split: str = "train") -> list[Stream]:
    """Find the random generators of a client's data set, its transforms and its datamodule, with their states."""
    own = [value for name, value in vars(data).items() if name != "splits"]  # splits holds other clients' data too
    waiting, seen, found = [*own, data.client_dataset(client, split)], dict[int, Any](), list[Stream]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, OTHERS):
            continue
        seen[id(part)] = part
        if isinstance(part, STREAMS):
            found += [] if any(part is stream for stream in GLOBAL_STREAMS) else [Stream(part)]
        elif isinstance(part, Mapping | list | tuple) and len(part) <= FEW:
            waiting.extend(part.values() if isinstance(part, Mapping) else part)
        elif hasattr(part, "__dict__"):
            of_its_class = (value for kind in type(part).__mro__ for value in vars(kind).values())
            waiting.extend([*vars(part).values(), *(value for value in of_its_class if isinstance(value, STREAMS))])
    return found


@contextmanager
def undisturbed(data: Any, client: ClientId, split: str) -> Iterator[None]:
    """Restore the random generators of a client's data after a with block."""
    streams = streams_of(data, client, split)
    try:
        yield
    finally:
        for stream in streams:
            if stream.changed():
                stream.restore()
