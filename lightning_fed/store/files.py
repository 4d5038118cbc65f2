"""Write records into files: large records into a file each, the small records of a commit to the end of a segment."""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import astuple
from pathlib import Path
from typing import BinaryIO

from lightning_fed.core.memory import ClientId
from lightning_fed.store import durable
from lightning_fed.store.damage import DamagedRecordError
from lightning_fed.store.identity import SERVER, cid_of, key_of, name_of
from lightning_fed.store.records import Encoded, Location, Record, encode
from lightning_fed.store.schema import Moved, Row

LARGE = 2**20  # minimum bytes of a record that gets its own file
SEGMENT = 2**24  # bytes from which a segment is closed

_NAME = re.compile(r"[0-9a-f]+(-[0-9a-f-]+\.safetensors|\.segment)")


def is_large(record: Record) -> bool:
    """Whether a record gets its own file.

    >>> is_large(Record("a", 0, {}))
    False
    """
    return record.bytes >= LARGE


def write_alone(folder: Path, record: Record, encoded: Encoded | None = None) -> Row:
    """Write a record to its own file; the caller syncs the folder."""
    encoded = encoded or encode(record)
    name = f"{name_of(key_of_record(record))}-{record.round}-{encoded.digest.hex()[:16]}.safetensors"
    durable.write(folder / name, encoded.buffers, sync=False)
    return row_of(record, encoded, name, 0)


class Segments:
    """The segment to which small records are appended: one sync per commit, and few files to link in a snapshot.

    Only the store that created a segment appends to it. If a snapshot, or a store restored from one, links the segment,
    it grows only beyond the bytes that their indices name.

    >>> from tempfile import mkdtemp
    >>> segments = Segments(Path(mkdtemp()))
    >>> [start for _, start in (segments.append([b"one"]), segments.append([b"two"]))]
    [0, 3]
    >>> segments.close()
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.name = ""  # name of the open segment
        self._file: BinaryIO | None = None

    def append(self, buffers: Iterable[durable.Buffer]) -> tuple[str, int]:
        """Append buffers durably; return the name of the file and the offset of the first one."""
        if self._file is not None and os.fstat(self._file.fileno()).st_size >= SEGMENT:
            self.close()
        if self._file is None:
            self.name = f"{secrets.token_hex(16)}.segment"
            self._file = durable.create(self.folder / self.name)
        return self.name, durable.append(self._file.fileno(), self.folder / self.name, buffers)

    def size(self) -> int:
        """Bytes of the open segment, including those of a failed commit."""
        return 0 if self._file is None else os.fstat(self._file.fileno()).st_size

    def close(self) -> None:
        """Close the open segment; the next append opens a new one."""
        if self._file is not None:
            self._file.close()
        self._file, self.name = None, ""


def read_raw(folder: Path, name: str, held: Iterable[Moved]) -> list[tuple[Moved, bytes]]:
    """Read the bytes of records of one segment, unverified, since they contain checksums; skip truncated ones."""
    with suppress(OSError), (folder / name).open("rb") as file:
        found = [(old, os.pread(file.fileno(), old.length, old.start)) for old in held]
        return [(old, raw) for old, raw in found if len(raw) == old.length]
    return []


def row_of(record: Record, encoded: Encoded, file: str, start: int) -> Row:
    """Make the index entry of a record in ``file`` at ``start``."""
    facts = record.round, record.visits, *astuple(record.cost), record.layout
    return Row(key_of_record(record), file, start, encoded.length, encoded.digest, *facts)


def location_of(folder: Path, row: Row) -> Location:
    """The location that an index entry names; refuse a file name that no store creates, as it may leave the folder."""
    if _NAME.fullmatch(row.file) is None:
        raise ValueError(f"The index of {folder} names {row.file!r}, which is not a file of a store.")
    client: ClientId | None = None if row.key == SERVER else cid_of(row.key)
    return Location(folder / row.file, row.start, row.length, row.digest, client, row.round)


def key_of_record(record: Record) -> bytes:
    """The key of the client, or of the server, that owns a record.

    >>> key_of_record(Record("a", 0, {})), key_of_record(Record(None, 0, {}))
    (b's:a', b'server')
    """
    return SERVER if record.client is None else key_of(record.client)


def prepare(folder: Path, new: bool = False) -> Path:
    """Prepare a folder for an index; return the folder of its records, which is empty unless there is an index.

    >>> from tempfile import mkdtemp
    >>> prepare(Path(mkdtemp())).name
    'records'
    """
    index = folder / "index.sqlite3"
    if new or not index.exists():
        clear(folder)
    records = durable.make_folder(folder / "records")
    if index.exists() and index.stat().st_size == 0 and any(records.iterdir()):
        raise DamagedRecordError(index, "index", "it is empty, but there are records")
    return records


def sweep(folder: Path, named: Mapping[str, int]) -> None:
    """Remove files that no manifest names: temporary, staged and superseded records, tails of segments.

    If a named file is missing, the index or the files are damaged, so nothing is removed.
    """
    durable.remove(durable.temporary(folder.parent / "index.sqlite3"))
    found = list(os.scandir(folder))
    if not named.keys() <= {entry.name for entry in found}:
        return
    for entry in found:
        if entry.name not in named:
            durable.remove(Path(entry.path))
        elif entry.name.endswith(".segment") and entry.stat().st_nlink == 1:  # otherwise a snapshot may use the tail
            durable.cut(Path(entry.path), named[entry.name])


def clear(folder: Path) -> None:
    """Remove a store from its folder, the index first, because without the index the records are garbage."""
    for name in ("index.sqlite3", "index.sqlite3-wal", "index.sqlite3-shm"):
        durable.remove(folder / name)
    durable.sync_folder(folder)
    durable.remove_folder(folder / "records")
