"""Write records into files: large ones alone, the small ones of a commit together in one segment."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import astuple
from hashlib import sha256
from pathlib import Path

from lightning_fed.core.memory import ClientId
from lightning_fed.store import durable
from lightning_fed.store.identity import SERVER, cid_of, key_of, name_of
from lightning_fed.store.index import Moved, Row
from lightning_fed.store.records import Encoded, Location, Record, encode

LARGE = 2**20  # bytes from which a record has a file of its own

_NAME = re.compile(r"[0-9a-f]+-[0-9-]*[0-9a-f]+\.(safetensors|segment)")


def is_large(record: Record) -> bool:
    """Whether a record has a file of its own.

    >>> is_large(Record("a", 0, {}))
    False
    """
    return record.bytes >= LARGE


def write_alone(folder: Path, record: Record, encoded: Encoded | None = None) -> Row:
    """Write a record as a file of its own; the caller syncs the folder."""
    encoded = encoded or encode(record)
    name = f"{name_of(key_of_record(record))}-{record.round}-{encoded.digest.hex()[:16]}.safetensors"
    durable.write(folder / name, encoded.buffers, sync=False)
    return row_of(record, encoded, name, 0)


def write_segment(
    folder: Path, round: int, fresh: Sequence[tuple[Record, Encoded]], moved: Sequence[tuple[Moved, bytes]]
) -> tuple[str, list[Row], list[Moved]]:
    """Write small records, and those of hollow segments, as one file; return its name and where each lies."""
    digests = [encoded.digest for _, encoded in fresh] + [old.digest for old, _ in moved]
    name = f"{sha256(b''.join(digests)).hexdigest()[:32]}-{round}-{len(digests)}.segment"
    buffers: list[durable.Buffer] = []
    rows, places, at = [], [], 0
    for record, encoded in fresh:
        rows.append(row_of(record, encoded, name, at))
        buffers += encoded.buffers
        at += encoded.length
    for old, raw in moved:
        places.append(old._replace(start=at))
        buffers.append(raw)
        at += len(raw)
    durable.write(folder / name, [b"".join(buffers)], sync=False)
    return name, rows, places


def read_raw(folder: Path, name: str, held: Iterable[Moved]) -> list[tuple[Moved, bytes]] | None:
    """The bytes of records of one segment, unverified: their checksums go with them. None if they cannot be had."""
    with suppress(OSError), (folder / name).open("rb") as file:
        found = [(old, os.pread(file.fileno(), old.length, old.start)) for old in held]
        if all(len(raw) == old.length for old, raw in found):
            return found
    return None


def row_of(record: Record, encoded: Encoded, file: str, start: int) -> Row:
    """The entry of the index for a record at this place."""
    facts = record.round, record.visits, *astuple(record.cost), record.layout
    return Row(key_of_record(record), file, start, encoded.length, encoded.digest, *facts)


def location_of(folder: Path, row: Row) -> Location:
    """The place that an entry of the index names; refuse a name that no store gives."""
    if _NAME.fullmatch(row.file) is None:
        raise ValueError(f"The index of {folder} names {row.file!r}, which is not a file of a store.")
    client: ClientId | None = None if row.key == SERVER else cid_of(row.key)
    return Location(folder / row.file, row.start, row.length, row.digest, client, row.round)


def key_of_record(record: Record) -> bytes:
    """The key of the client, or of the server, that a record is of.

    >>> key_of_record(Record("a", 0, {})), key_of_record(Record(None, 0, {}))
    (b's:a', b'server')
    """
    return SERVER if record.client is None else key_of(record.client)
