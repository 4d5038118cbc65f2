"""Client memories on disk."""

from __future__ import annotations

import os
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fed.core.memory import Adapt, Build, ClientId, Deferred, Memory, Summary, with_tensors
from lightning_fed.store.commit import commit, remove_empty
from lightning_fed.store.files import Segments, clear, key_of_record, location_of, prepare, sweep
from lightning_fed.store.identity import SERVER, cid_of, key_of
from lightning_fed.store.index import Index
from lightning_fed.store.lease import Lease
from lightning_fed.store.reader import Reader
from lightning_fed.store.records import Location, Record
from lightning_fed.store.schema import Row
from lightning_fed.store.snapshots import copy_snapshot, make_snapshot
from lightning_fed.store.space import check_space
from lightning_fed.store.staging import Staging

_OPEN: weakref.WeakSet[DiskStore] = weakref.WeakSet()
_OF_PARENTS: list[Any] = []


class DiskStore:
    """Client memories in a folder; each commit is durable as a whole.

    Has the methods of ``MemoryStore``. Only the process and thread that opened it may use it; a forked child may only
    read records by the locations of :meth:`locate`.

    Args:
        folder: made if it is not there; one writer at a time.
        fresh: the state of round 0.
        adapt: makes a memory of the present layout from one of an older layout, when it is read.
        build: makes a state of its tensors and the number of their layout; by default a state like ``fresh()``.
        cache_bytes: most bytes of recent records in RAM; as much again may be read ahead.
        new: start empty, whatever the folder holds.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> from lightning_fed.algorithms import FedADMM
    >>> folder, fresh = Path(mkdtemp()), lambda: FedADMM().init_client(torch.zeros(2))
    >>> with DiskStore(folder, fresh) as store:
    ...     store.commit(1, {"a": Memory(fresh(), visits=1)}, server={"x_bar": torch.ones(2)})
    >>> with DiskStore(folder, fresh) as store:
    ...     store.round, list(store), store["a"].visits, store.server()
    (1, ['a'], 1, {'x_bar': tensor([1., 1.])})
    """

    _open = False

    def __init__(
        self,
        folder: Path | str,
        fresh: Callable[[], Any],
        *,
        adapt: Adapt | None = None,
        build: Build | None = None,
        cache_bytes: int = 2**28,
        new: bool = False,
    ) -> None:
        self.folder, self.fresh = Path(folder), fresh
        self._adapt = adapt or (lambda memory: memory)
        self._build = build or (lambda tensors, layout: with_tensors(self.fresh(), tensors))
        self._lease = Lease(self.folder)
        self._pid = os.getpid()
        try:
            self._records = prepare(self.folder, new)
            self._index = Index.open(self.folder / "index.sqlite3")
            sweep(self._records, self._index.files())
        except BaseException:
            self._lease.release()
            raise
        self._reader = Reader(self._records, cache_bytes)
        self._segments = Segments(self._records)
        self._staging = Staging(self._records)
        opened(self)

    def __getitem__(self, cid: ClientId) -> Memory:
        found = self.get(cid)
        return Memory(self.fresh()) if found is None else found

    def get(self, cid: ClientId) -> Memory | None:
        """The memory of a client, if it has taken part."""
        row = self._here().find(key_of(cid))
        if row is None:
            return None
        record = self._reader.record(row)
        state, known = self._build(record.tensors, record.layout), row.summary()
        return self._adapt(Memory(state, known.visits, record.buffers, known.cost, record.layout))

    def __iter__(self) -> Iterator[ClientId]:
        return (cid_of(row.key) for row in self._here().rows())

    def __len__(self) -> int:
        return self._here().count()

    def put(self, memories: Mapping[ClientId, Memory]) -> None:
        """Commit memories without a new round."""
        self.commit(self.round or 0, memories)

    @property
    def rounds(self) -> list[int]:
        """The rounds of the two newest commits, the older first."""
        return self._here().rounds

    @property
    def round(self) -> int | None:
        """The round of the newest commit."""
        return next(reversed(self.rounds), None)

    def server(self) -> Mapping[str, Tensor] | None:
        """The server's tensors of the newest commit that had any."""
        row = self._here().find(SERVER)
        return None if row is None else self._reader.record(row).tensors

    def prefetch(self, cids: Iterable[ClientId]) -> None:
        """Read these clients' records in the background, in this order, ahead of :meth:`get`."""
        found = [self._here().find(key_of(cid)) for cid in cids]
        self._reader.ahead(row for row in found if row is not None)

    def stage(self, cid: ClientId, memory: Memory, round: int) -> None:
        """Start writing a client's memory ahead of the commit of ``round``, which makes it visible."""
        self._here()
        self._staging.stage(cid, memory, round)

    def written(self, cid: ClientId) -> Row | None:
        """The row of a client's staged record, if it has a file of its own; waits until it is written."""
        self._here()
        return self._staging.written(cid)

    def load(self, row: Row) -> Any:
        """The state in a record that another process has staged."""
        record = self._reader.record(row)
        return self._build(record.tensors, record.layout)

    def commit(
        self,
        round: int,
        memories: Mapping[ClientId, Memory | None],
        server: Mapping[str, Tensor] | None = None,
        removed: Iterable[ClientId] = (),
    ) -> None:
        """Write the next manifest: all memories and the server together. Repeating a commit changes nothing.

        Args:
            memories: new memories by client; None takes the staged memory.
            server: the server's tensors, if the store keeps them.
            removed: clients whose memories are removed.
        """
        index = self._here()
        try:
            entries = self._entries(round, memories, server)
            rows = commit(index, self._segments, round, entries, [key_of(cid) for cid in removed])
        finally:
            self._staging.drop(index)
        for record in entries:
            if isinstance(record, Record) and (row := rows.get(key_of_record(record))) is not None:
                self._reader.keep(row, record)

    def roll_back(self) -> None:
        """Return to the older of the two newest commits."""
        remove_empty(self._segments, self._here(), self._here().roll_back())

    def summary(self, cid: ClientId) -> Summary | None:
        """Visits, cost and bytes of a client that has taken part."""
        row = self._here().find(key_of(cid))
        return None if row is None else row.summary()

    def summaries(self) -> Iterator[tuple[ClientId, Summary]]:
        """Visits, cost and bytes of all clients that have taken part."""
        return ((cid_of(row.key), row.summary()) for row in self._here().rows())

    def locate(self, cid: ClientId) -> Location | None:
        """Location of a client's record; other processes may ``records.read`` it until the second commit from now."""
        row = self._here().find(key_of(cid))
        return None if row is None else location_of(self._records, row)

    def check_space(self, bytes: int) -> None:
        """Raise an error with the numbers if the disk has less than ``bytes`` left."""
        check_space(self.folder, bytes)

    def snapshot(self, folder: Path | str) -> dict[str, Any]:
        """Create a folder with the newest commit, by links to its records; return its manifest."""
        return make_snapshot(self._here(), self._records, Path(folder))

    @classmethod
    def restore(cls, snapshot: Path | str, folder: Path | str, fresh: Callable[[], Any], **options: Any) -> DiskStore:
        """Open a new store that starts from a snapshot; replaces a store that ``folder`` holds."""
        with Lease(Path(folder)):
            clear(Path(folder))
            copy_snapshot(Path(snapshot), Path(folder))
        return cls(folder, fresh, **options)

    def quiesce(self) -> None:
        """Wait until all threads of the store are idle, so that the process may fork."""
        self._here()
        self._staging.quiesce()
        self._reader.quiesce()

    def close(self) -> None:
        """Drop staged records and release the folder to other writers; may be called twice."""
        if not self._open or self._pid != os.getpid():
            return
        self._reader.close()
        self._staging.close()
        self._staging.drop(self._index)
        self._open = False
        self._segments.close()
        self._index.close()
        self._lease.release()

    @property
    def is_mine(self) -> bool:
        """Whether this process opened the store, and has not closed it: a forked child must leave it alone."""
        return self._open and self._pid == os.getpid()

    def state_dict(self) -> None:
        """Nothing: a checkpoint has a snapshot beside it."""

    def __enter__(self) -> DiskStore:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _here(self) -> Index:
        if self._pid != os.getpid():
            raise RuntimeError(
                f"The store in {self.folder} belongs to process {self._pid}; this is its child {os.getpid()}."
                " Locate records before the fork, and read them by their locations."
            )
        if not self._open:
            raise RuntimeError(f"The store in {self.folder} is closed.")
        return self._index

    def _entries(
        self, round: int, memories: Mapping[ClientId, Memory | None], server: Mapping[str, Tensor] | None
    ) -> list[Record | Row]:
        entries: list[Record | Row] = []
        for cid, memory in memories.items():
            if memory is not None and isinstance(memory.state, Deferred):
                entries.append(memory.state.row._replace(visits=memory.visits, **asdict(memory.cost)))
            elif (entry := self._staging.entry(cid, memory, round)) is not None:
                entries.append(entry)
            elif memory is not None:
                entries.append(Record.of(cid, memory, round))
            else:
                raise ValueError(f"Client {cid!r} was not staged for round {round}, so its memory must be given.")
        if server is not None:
            entries.append(Record(None, round, server))
        return entries


def opened(store: DiskStore) -> None:
    """Note that a store is open, for the day when this process forks."""
    store._open = True
    _OPEN.add(store)


def _leave_to_parent() -> None:
    # keep a reference: closing the connection in a child, even by garbage collection, would harm the parent's database
    _OF_PARENTS.extend(store._index for store in _OPEN)


def _quiesce() -> None:
    # a child must not inherit locks that a thread of the store, which it does not have, would have released
    for store in list(_OPEN):
        if store.is_mine:
            store.quiesce()


os.register_at_fork(before=_quiesce, after_in_child=_leave_to_parent)
