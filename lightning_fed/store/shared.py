"""One store for several processes that share a disk: one of them commits, the others follow.

Every process writes the large records of its own clients, and has an index of its own to find those of all. The first
one writes the small records, moves and removes files, and tells the others what it has changed in its index.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fed.core.memory import ClientId, Memory
from lightning_fed.store import durable
from lightning_fed.store.disk import DiskStore, opened
from lightning_fed.store.files import Segments
from lightning_fed.store.index import Index
from lightning_fed.store.lease import Lease
from lightning_fed.store.reader import Reader
from lightning_fed.store.staging import Staging

#: Gives every process what the first one has.
Tell = Callable[[Any], Any]


class LeadingStore(DiskStore):
    """The store of the first process.

    ``tell`` is set before the first commit.
    """

    tell: Tell

    def commit(
        self,
        round: int,
        memories: Mapping[ClientId, Memory | None],
        server: Mapping[str, Tensor] | None = None,
        removed: Iterable[ClientId] = (),
    ) -> None:
        self._here().newest = None
        try:
            super().commit(round, memories, server, removed)
        except Exception as error:
            self.tell(f"{type(error).__name__}: {error}")
            raise
        self.tell(self._here().newest)


class FollowingStore(DiskStore):
    """The store of another process: its index lies in a folder of its own, its records where the first store has them.

    Args:
        folder: that of the first store, which is open.
        number: of this process.
        tell: gives what the first process has committed.
        snapshot: the snapshot that the first store was restored from, if it was.
    """

    def __init__(
        self,
        folder: Path,
        fresh: Callable[[], Any],
        number: int,
        tell: Tell,
        snapshot: Path | None = None,
        cache_bytes: int = 2**28,
        **how: Any,
    ) -> None:
        self.folder, self.fresh, self.tell = durable.make_folder(folder / f"rank-{number}"), fresh, tell
        self._adapt, self._build = how["adapt"], how["build"]
        self._lease, self._pid = Lease(self.folder), os.getpid()
        if snapshot is not None:
            durable.write(self.folder / "index.sqlite3", [(snapshot / "index.sqlite3").read_bytes()])
        self._records = folder / "records"
        self._index = Index.open(self.folder / "index.sqlite3")
        self._reader = Reader(self._records, cache_bytes)
        self._segments, self._staging = Segments(self._records), Staging(self._records)
        opened(self)

    def commit(
        self,
        round: int,
        memories: Mapping[ClientId, Memory | None],
        server: Mapping[str, Tensor] | None = None,
        removed: Iterable[ClientId] = (),
    ) -> None:
        """Follow the first process's commit; it has written what this one has not."""
        index, change = self._here(), self.tell(None)
        try:
            if isinstance(change, str):
                raise RuntimeError(f"The first process could not commit round {round}: {change}")
            if change is not None:
                index.commit(*change)
        finally:
            self._staging.drop(index)
