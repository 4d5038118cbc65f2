"""Reads what an offline W&B run really holds: LevelDB log framing around wandb's protobuf records."""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from wandb.proto.wandb_internal_pb2 import Record

IDENT, MAGIC, VERSION = b":W&B", 0xBEE1, 0
BLOCK, HEADER = 32 * 1024, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class OfflineRun:
    """History (one row per logged step), config, summary, and the names of media files, below ``folder/files``."""

    folder: Path
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)

    def series(self, key: str) -> dict[int, Any]:
        """Values of ``key`` by ``trainer/global_step``."""
        rows = [row for row in self.history if key in row]
        steps = [row["trainer/global_step"] for row in rows]
        assert len(steps) == len(set(steps)), f"{key} was logged more than once for a step: {steps}"
        return {step: row[key] for step, row in zip(steps, rows, strict=True)}

    def table(self, reference: dict[str, Any]) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows of a table that the history refers to."""
        content = json.loads((self.folder / "files" / reference["path"]).read_text())
        return content["columns"], content["data"]


def read_run(root: Path) -> OfflineRun:
    """The only offline run below ``root``; finish it first."""
    (path,) = root.glob("**/offline-run-*/run-*.wandb")
    run = OfflineRun(path.parent)
    for data in frames(path.read_bytes()):
        record = Record.FromString(data)
        kind = record.WhichOneof("record_type")
        if kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "run":
            run.config |= _items(record.run.config.update)
        elif kind == "config":
            run.config |= _items(record.config.update)
        elif kind == "summary":
            run.summary |= _items(record.summary.update)
        elif kind == "files":
            run.files += [item.path for item in record.files.files]
    return run


def frames(data: bytes) -> Iterator[bytes]:
    """The records of a log: blocks of 32 KiB, in which a record is one piece or several."""
    assert data[:HEADER] == IDENT + struct.pack("<HB", MAGIC, VERSION), f"not a W&B log: {data[:HEADER]!r}"
    at, pieces = HEADER, b""
    while at < len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER : at + HEADER + length]
        assert len(piece) == length, "the log is cut off: was the run finished?"
        assert checksum == zlib.crc32(piece, zlib.crc32(bytes([kind]))), f"broken record at byte {at}"
        assert (kind in (MIDDLE, LAST)) == bool(pieces), f"record of kind {kind} at byte {at} is out of order"
        pieces += piece
        if kind in (FULL, LAST):
            yield pieces
            pieces = b""
        at += HEADER + length


def _items(items: Any) -> dict[str, Any]:
    """JSON values by key; a nested key makes nested dictionaries."""
    found: dict[str, Any] = {}
    for item in items:
        *outer, last = item.nested_key or [item.key]
        inner = found
        for key in outer:
            inner = inner.setdefault(key, {})
        inner[last] = json.loads(item.value_json)
    return found
