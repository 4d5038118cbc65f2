"""Commit records: write those that are not yet on disk, then update the index in one transaction."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from lightning_fed.store import durable
from lightning_fed.store.files import Segments, is_large, key_of_record, read_raw, row_of, write_alone
from lightning_fed.store.index import Index
from lightning_fed.store.records import Encoded, Record, encode
from lightning_fed.store.schema import Moved, Row

_LEAST_MOVED = 2**16  # bytes of old records that even the smallest commit may move


def commit(
    index: Index, segments: Segments, round: int, entries: Sequence[Record | Row], removed: Sequence[bytes] = ()
) -> dict[bytes, Row]:
    """Make ``entries`` the newest records of their clients; return their rows by key.

    A Row represents a record that is on disk already. After a failure nothing has changed. Repeating a commit changes
    nothing.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> index, segments = Index.open(folder / "index.sqlite3"), Segments(folder)
    >>> record = Record("a", 3, {}, visits=1)
    >>> list(commit(index, segments, 3, [record])), list(commit(index, segments, 3, [record]))
    ([b's:a'], [])
    >>> segments.close(); index.close()
    """
    fresh = [(entry, encode(entry)) for entry in entries if isinstance(entry, Record)]
    written = [entry for entry in entries if isinstance(entry, Row)]
    digests = {key_of_record(r): e.digest for r, e in fresh} | {row.key: row.digest for row in written}
    if index.rounds[-1:] == [round] and _is_done(index, digests, removed):
        return {}
    files = {row.file: row.length for row in written}
    folder = segments.folder
    try:
        rows = written + _write_large(folder, files, fresh)
        if files:
            durable.sync_folder(folder)
        small, moved = _write_small(index, segments, files, fresh)
        rows += small
        empty = index.commit(round, rows, files, moved, removed)
    except BaseException:
        discard(folder, index, files.keys() - {segments.name})
        raise
    remove_empty(segments, index, empty)
    return {row.key: row for row in rows}


def _is_done(index: Index, digests: Mapping[bytes, bytes], removed: Sequence[bytes]) -> bool:
    found = {key: index.find(key) for key in (*digests, *removed)}
    return {key: row.digest for key, row in found.items() if row is not None} == digests


def _write_large(folder: Path, files: dict[str, int], fresh: Iterable[tuple[Record, Encoded]]) -> list[Row]:
    rows = []
    for record, encoded in fresh:
        if is_large(record):
            rows.append(write_alone(folder, record, encoded))
            files[rows[-1].file] = encoded.length
    return rows


def _write_small(
    index: Index, segments: Segments, files: dict[str, int], fresh: Iterable[tuple[Record, Encoded]]
) -> tuple[list[Row], list[tuple[str, Moved]]]:
    """Append the small records, and some living records of hollow segments, to the open segment."""
    small = [(record, encoded) for record, encoded in fresh if not is_large(record)]
    budget = max(_LEAST_MOVED, 2 * sum(encoded.length for _, encoded in small))
    hollow = index.hollow(budget, segments.name)
    kept = [found for name, held in hollow for found in read_raw(segments.folder, name, held)]
    if not small and not kept:
        return [], []
    name, at = segments.append([b for _, e in small for b in e.buffers] + [raw for _, raw in kept])
    rows, moved = [], []
    for record, encoded in small:
        rows.append(row_of(record, encoded, name, at))
        at += encoded.length
    for old, _ in kept:
        moved.append((name, old._replace(start=at)))
        at += old.length
    files[name] = segments.size()
    return rows, moved


def remove_empty(segments: Segments, index: Index, names: Iterable[str]) -> None:
    """Remove files without records; close the open segment if it is one of them."""
    if segments.name in names:
        segments.close()
    discard(segments.folder, index, names)


def discard(folder: Path, index: Index, names: Iterable[str]) -> None:
    """Remove files that no kept manifest names; if a removal fails, opening the store repeats it."""
    for name in names:
        if not index.has_file(name):
            with suppress(OSError):
                durable.remove(folder / name)
