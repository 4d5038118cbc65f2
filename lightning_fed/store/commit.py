"""One commit: write what is not yet on disk, then move the index in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_fed.store import durable
from lightning_fed.store.files import is_large, key_of_record, read_raw, write_alone, write_segment
from lightning_fed.store.index import Index, Moved, Row
from lightning_fed.store.records import Encoded, Record, encode

_LEAST_MOVED = 2**20  # bytes of old records that a commit may move, however small it is itself


def commit(folder: Path, index: Index, round: int, entries: Sequence[Record | Row]) -> dict[bytes, Row]:
    """Make ``entries`` the newest records of their clients; return their rows by key.

    A Row stands for a record that is on disk already. If anything fails, nothing has changed. To redo a commit
    changes nothing.
    """
    fresh = [(entry, encode(entry)) for entry in entries if isinstance(entry, Record)]
    written = [entry for entry in entries if isinstance(entry, Row)]
    digests = {key_of_record(r): e.digest for r, e in fresh} | {row.key: row.digest for row in written}
    if index.rounds[-1:] == [round] and all(_is_living(index, key, digest) for key, digest in digests.items()):
        return {}
    files = {row.file: row.length for row in written}
    try:
        rows = written + _write_large(folder, files, fresh)
        small, moved = _write_small(folder, index, round, files, fresh)
        rows += small
        durable.sync_folder(folder)
        empty = index.commit(round, rows, files, moved)
    except BaseException:
        discard(folder, index, files)
        raise
    discard(folder, index, empty)
    return {row.key: row for row in rows}


def _is_living(index: Index, key: bytes, digest: bytes) -> bool:
    row = index.find(key)
    return row is not None and row.digest == digest


def _write_large(folder: Path, files: dict[str, int], fresh: Iterable[tuple[Record, Encoded]]) -> list[Row]:
    rows = []
    for record, encoded in fresh:
        if is_large(record):
            rows.append(write_alone(folder, record, encoded))
            files[rows[-1].file] = encoded.length
    return rows


def _write_small(
    folder: Path, index: Index, round: int, files: dict[str, int], fresh: Iterable[tuple[Record, Encoded]]
) -> tuple[list[Row], list[tuple[str, Moved]]]:
    """Write one segment: the small records, and what is left of hollow segments."""
    small = [(record, encoded) for record, encoded in fresh if not is_large(record)]
    budget = max(_LEAST_MOVED, 2 * sum(encoded.length for _, encoded in small))
    kept = [found for name, held in index.hollow(budget) for found in read_raw(folder, name, held) or ()]
    if not small and not kept:
        return [], []
    name, rows, places = write_segment(folder, round, small, kept)
    files[name] = sum(row.length for row in rows) + sum(place.length for place in places)
    return rows, [(name, place) for place in places]


def discard(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Remove files that no kept manifest names. What cannot be removed now is removed when the store is opened."""
    for name in names:
        if not index.has_file(name):
            with suppress(OSError):
                durable.remove(folder / name)
