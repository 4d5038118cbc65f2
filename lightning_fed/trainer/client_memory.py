"""Where clients' memories are kept during a fit: in RAM, or in a folder beside the checkpoints."""

from __future__ import annotations

import os
import secrets
import shutil
import threading
import weakref
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from lightning_fed.core.federation import Federation
from lightning_fed.core.memory import MemoryStore
from lightning_fed.core.records import num_bytes
from lightning_fed.lightning import pl, rank_zero_info
from lightning_fed.sampling import Full, Sampler, Uniform
from lightning_fed.store import (
    DiskStore,
    Lease,
    LeaseError,
    check_space,
    memories_in,
)
from lightning_fed.store.shared import FollowingStore, LeadingStore
from lightning_fed.trainer.ranks import Ranks, ranks_of

StoreName = Literal["auto", "memory", "disk"]

#: Bytes of all memories up to which ``auto`` keeps them in RAM; every checkpoint then holds all of them.
SMALL = 2**29
#: Share of the free memory that they may take.
SHARE = 4


@dataclass(frozen=True)
class Need:
    """What the clients that a run can visit will need: their number, and bytes for each."""

    clients: int
    bytes_each: int

    @classmethod
    def of(cls, trainer: pl.Trainer, federation: Federation, sampler: Sampler, keeps_buffers: bool) -> Need:
        n, rounds = len(federation.weights), trainer.max_epochs
        largest = sampler.size if isinstance(sampler, Uniform) else n
        visits = n if rounds is None or rounds < 0 or isinstance(sampler, Full) else largest * rounds
        own = {**(federation.buffers if keeps_buffers else {}), **federation.first}
        return cls(min(n, len(federation.store) + visits), num_bytes(federation.fresh()) + num_bytes(own))

    @property
    def bytes(self) -> int:
        return self.clients * self.bytes_each

    def __str__(self) -> str:
        return f"{self.clients:,} clients x {_size(self.bytes_each)} = {_size(self.bytes)}"


class ClientMemory:
    """Keeps the memories of one trainer's federation.

    Args:
        asked: ``memory``, ``disk``, or ``auto``: on disk where the clients that the run can visit need more than
            512 MB, or a quarter of the free memory.
        folder: of memories on disk; ``client_memory`` beside the checkpoints by default.
    """

    def __init__(self, asked: StoreName, folder: Path | None = None) -> None:
        self.asked, self.folder = asked, folder
        self._lease: Lease | None = None

    def begin_fit(self, trainer: pl.Trainer) -> None:
        """Refuse a second process that would write to the same run, and clear what dead ones left behind."""
        if trainer.fast_dev_run or self._lease is not None:
            return
        ranks = ranks_of(trainer)
        if ranks.is_first and (trainer.checkpoint_callbacks or self.asked == "disk"):
            folder = self._folder(trainer)
            self._lease = Lease(folder)
            for left in folder.iterdir():
                if left.is_dir():
                    with suppress(LeaseError):
                        Lease(left).release()
                        shutil.rmtree(left)
        ranks.barrier()

    def end_fit(self, trainer: pl.Trainer) -> None:
        """Let another process write to the run; say what the processes of this one have told each other."""
        ranks = ranks_of(trainer)
        if ranks.sent:
            rank_zero_info(f"The first of {ranks.size} processes has sent {_size(ranks.sent)} to the others.")
        if self._lease is not None:
            self._lease.release()
            _remove_if_unused(self._lease.path.parent)
        self._lease = None

    def open(
        self,
        trainer: pl.Trainer,
        federation: Federation,
        need: Need,
        snapshot: Path | None = None,
        saved: Mapping[Any, Any] | None = None,
    ) -> None:
        """Give the federation its store, with the memories of a checkpoint's ``snapshot``, or ``saved`` in it."""
        where, ranks = self._folder(trainer), ranks_of(trainer)
        if ranks.broadcast(self._on_disk(trainer, need)):
            check_space(where, need.bytes)
            rank_zero_info(f"Clients' memories are kept on disk, in {where}: up to {need}.")
            store = self._disk(where / ranks.broadcast(secrets.token_hex(8)), federation, snapshot, ranks)
            if saved:
                whole = MemoryStore(federation.fresh, federation.adapt, federation.build)
                whole.load_state_dict(saved)
                store.commit(federation.rounds_done, {cid: whole[cid] for cid in whole})
            federation.store = store
            weakref.finalize(federation, _discard, store)
            return
        each = f" in each of {ranks.size} processes, which tell each other all new states" if ranks.size > 1 else ""
        rank_zero_info(f"Clients' memories are kept in RAM: up to {need}{each}.")
        federation.store = MemoryStore(federation.fresh, federation.adapt, federation.build)
        if saved:
            federation.store.load_state_dict(saved)
        if snapshot is not None:
            federation.store.put(memories_in(snapshot, federation.build))

    def _disk(self, folder: Path, federation: Federation, snapshot: Path | None, ranks: Ranks) -> DiskStore:
        fresh, how = _weak(federation.fresh), {"adapt": _weak(federation.adapt), "build": _weak(federation.build)}
        if not ranks.is_first:
            ranks.barrier()  # the first process has made the folder then
            return FollowingStore(folder, fresh, ranks.rank, ranks.broadcast, snapshot, **how)
        kind = DiskStore if ranks.size == 1 else LeadingStore
        store = (
            kind(folder, fresh, new=True, **how) if snapshot is None else kind.restore(snapshot, folder, fresh, **how)
        )
        if isinstance(store, LeadingStore):
            store.tell = ranks.broadcast
            ranks.barrier()
        return store

    def _on_disk(self, trainer: pl.Trainer, need: Need) -> bool:
        if self.asked != "auto" or trainer.fast_dev_run:
            return self.asked == "disk" and not trainer.fast_dev_run
        return need.bytes * ranks_of(trainer).size > min(SMALL, _free_memory() // SHARE)

    def _folder(self, trainer: pl.Trainer) -> Path:
        if self.folder is not None:
            return self.folder
        known = [getattr(callback, "dirpath", None) for callback in trainer.checkpoint_callbacks]
        base = next((path for path in known if path and "://" not in str(path)), trainer.default_root_dir)
        return Path(base) / "client_memory"


def _weak(method: Any) -> Any:
    """A method that does not keep its object alive: the store is removed when the federation is gone."""
    known = weakref.WeakMethod(method)

    def call(*args: Any) -> Any:
        alive = known()
        assert alive is not None
        return alive(*args)

    return call


def _free_memory() -> int:
    """Bytes that may be allocated: what the system, and the container if there is one, have left."""
    with suppress(OSError, ValueError, StopIteration):
        lines = Path("/proc/meminfo").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("MemAvailable")).split()[1]) * 1024
    with suppress(AttributeError, ValueError, OSError):
        return os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return 2**32


def _size(count: int) -> str:
    for unit, size in (("GB", 10**9), ("MB", 10**6), ("kB", 10**3)):
        if count >= size:
            return f"{count / size:.3g} {unit}"
    return f"{count} bytes"


def _discard(store: DiskStore) -> None:
    """Remove a store that nothing refers to any more: checkpoints have links to its records of their own."""
    if not store.is_mine:
        return
    if threading.current_thread() is threading.main_thread():
        _close_and_remove(store)
    else:  # garbage may be collected in a thread of the store itself, which cannot wait for its own end
        threading.Thread(target=_close_and_remove, args=(store,)).start()


def _close_and_remove(store: DiskStore) -> None:
    store.close()
    shutil.rmtree(store.folder, ignore_errors=True)
    _remove_if_unused(store.folder.parent)


def _remove_if_unused(folder: Path) -> None:
    """Remove the folder of a run's stores if it holds no store, and no other process is about to make one."""
    with suppress(OSError, LeaseError):
        if [left.name for left in folder.iterdir()] in ([], ["lease"]):
            with Lease(folder):
                (folder / "lease").unlink()
            folder.rmdir()
