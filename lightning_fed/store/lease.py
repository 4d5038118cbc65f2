"""Allow one writer per folder: by a lock that the kernel releases when its holder dies, and a note of the holder."""

from __future__ import annotations

import fcntl
import json
import os
import socket
import time
import weakref
from pathlib import Path

from lightning_fed.store import durable

_HELD: weakref.WeakSet[Lease] = weakref.WeakSet()


class LeaseError(RuntimeError):
    """Another process writes to this folder; the message names the process.

    >>> raise LeaseError("run is in use by process 7 on host, since 2026-01-01 00:00:00.")
    Traceback (most recent call last):
        ...
    lightning_fed.store.lease.LeaseError: run is in use by process 7 on host, since 2026-01-01 00:00:00.
    """


class Lease:
    """The right to write to a folder, until it is released or the process ends.

    A forked child does not hold the lease, even if it outlives its parent.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> with Lease(folder):
    ...     try:
    ...         Lease(folder)
    ...     except LeaseError as error:
    ...         f"process {os.getpid()} on" in str(error)
    True
    >>> Lease(folder).release()
    """

    def __init__(self, folder: Path) -> None:
        self._descriptor = -1
        self.path = durable.make_folder(Path(folder)) / "lease"
        try:
            self._descriptor = os.open(self.path, os.O_RDWR | os.O_CREAT, 0o644)
            fcntl.flock(self._descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.ftruncate(self._descriptor, 0)
            os.pwrite(self._descriptor, _note(), 0)
        except BlockingIOError:
            holder = _holder(self._descriptor)
            self.release()
            raise LeaseError(
                f"{self.path.parent} is in use by {holder}. Wait until it has ended, end it, or use another folder."
            ) from None
        except OSError as error:
            self.release()
            raise durable.WriteError.of(self.path, 0, error) from error
        _HELD.add(self)

    def release(self) -> None:
        """Release the folder to other writers; may be called twice."""
        if self._descriptor >= 0:
            os.close(self._descriptor)
            self._descriptor = -1

    def __enter__(self) -> Lease:
        return self

    def __exit__(self, *error: object) -> None:
        self.release()

    def __del__(self) -> None:
        self.release()


def _note() -> bytes:
    note = {"pid": os.getpid(), "host": socket.gethostname(), "started": time.strftime("%Y-%m-%d %H:%M:%S")}
    return json.dumps(note).encode()


def _holder(descriptor: int) -> str:
    try:
        note = json.loads(os.pread(descriptor, 10_000, 0))
        return f"process {note['pid']} on {note['host']}, since {note['started']}"
    except (OSError, ValueError, KeyError, TypeError):
        return "another process"


def _let_go_in_child() -> None:
    # closing the child's descriptor does not unlock: the parent's descriptor of the same open file holds the lock
    for lease in _HELD:
        lease.release()


os.register_at_fork(after_in_child=_let_go_in_child)
