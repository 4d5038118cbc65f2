"""Write large records in a background thread while other clients train, ahead of their commit."""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from torch import Tensor

from lightning_fed.core.memory import ClientId, Memory
from lightning_fed.store.commit import discard
from lightning_fed.store.files import is_large, write_alone
from lightning_fed.store.index import Index
from lightning_fed.store.records import Record
from lightning_fed.store.schema import Row

_MOST = 2  # maximum number of records that wait in RAM to be written


@dataclass(frozen=True)
class _Staged:
    state: weakref.ref[Any]
    buffers: Mapping[str, Tensor]
    record: Record | None  # a small one, which is written with its commit
    written: Future[Row] | None  # a large one


def _is_same(staged: _Staged, memory: Memory) -> bool:
    buffers = staged.buffers is memory.buffers or not (staged.buffers or memory.buffers)
    return staged.state() is memory.state and buffers


class Staging:
    """The records that the next commit may use.

    >>> from tempfile import mkdtemp
    >>> import torch
    >>> from lightning_fed.algorithms import FedADMM
    >>> folder, memory = Path(mkdtemp()), Memory(FedADMM().init_client(torch.zeros(2**18)), visits=1)
    >>> index, staging = Index.open(folder / "index.sqlite3"), Staging(folder)
    >>> staging.stage("a", memory, round=3)
    >>> staging.entry("a", None, round=4), staging.entry("a", memory, round=3).visits
    (None, 1)
    >>> staging.drop(index); staging.close(); index.close(); list(folder.glob("*.safetensors"))
    []
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._thread = ThreadPoolExecutor(1, "store-write")
        self._unfinished: list[Future[Row]] = []
        self._staged: dict[ClientId, _Staged] = {}
        self._replaced: list[Future[Row]] = []

    def stage(self, cid: ClientId, memory: Memory, round: int) -> None:
        """Stage a client's memory for the commit of ``round``; wait while too many large records are unfinished."""
        record = Record.of(cid, memory, round)
        large = is_large(record)
        before = self._staged.get(cid)
        if before is not None and before.written is not None:
            self._replaced.append(before.written)
        written = self._write(record) if large else None
        self._staged[cid] = _Staged(weakref.ref(memory.state), memory.buffers, None if large else record, written)

    def _write(self, record: Record) -> Future[Row]:
        while len(self._unfinished) >= _MOST:
            wait(self._unfinished[:1])
            self._unfinished = [future for future in self._unfinished if not future.done()]
        future = self._thread.submit(write_alone, self.folder, record)
        self._unfinished.append(future)
        return future

    def entry(self, cid: ClientId, memory: Memory | None, round: int) -> Record | Row | None:
        """What was staged for this round, if it is this very state (or any, for None); wait until it is written.

        Visits and cost are those of ``memory``: they are known only at the end of the round.
        """
        staged = self._staged.get(cid)
        if staged is None or (memory is not None and not _is_same(staged, memory)):
            return None
        entry = staged.record if staged.written is None else staged.written.result()
        if entry is None or entry.round != round or memory is None:
            return None if entry is None or entry.round != round else entry
        if isinstance(entry, Record):
            return replace(entry, visits=memory.visits, cost=memory.cost)
        return entry._replace(visits=memory.visits, **asdict(memory.cost))

    def written(self, cid: ClientId) -> Row | None:
        """The row of a large record, when it is written; None if there is none for this client."""
        staged = self._staged.get(cid)
        return None if staged is None or staged.written is None else staged.written.result()

    def drop(self, index: Index) -> None:
        """Drop all staged records, and remove their files that were not committed."""
        staged, self._staged = self._staged, {}
        replaced, self._replaced = self._replaced, []
        for future in [*replaced, *(entry.written for entry in staged.values() if entry.written is not None)]:
            if future.exception() is None:
                discard(self.folder, index, [future.result().file])

    def quiesce(self) -> None:
        """Wait until no record is being written."""
        self._thread.submit(int).result()  # the one thread runs tasks in order, so all earlier ones are done
        self._unfinished.clear()

    def close(self) -> None:
        """Finish writing; nothing can be staged afterwards."""
        self._thread.shutdown()
