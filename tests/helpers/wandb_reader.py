"""Reads what an offline W&B run really holds: LevelDB log framing around wandb's protobuf records."""

from __future__ import annotations

import json
import struct
import time
import zlib
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from wandb.proto.wandb_internal_pb2 import Record

FOLDERS = ("WANDB_DIR", "WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")

IDENT, MAGIC, VERSION = b":W&B", 0xBEE1, 0
BLOCK, HEADER = 32 * 1024, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


@dataclass
class Artifact:
    """An artifact: its files by their names in it, where W&B keeps them until they are uploaded."""

    name: str
    type: str
    aliases: list[str]
    metadata: dict[str, Any]
    files: dict[str, Path]


@dataclass
class OfflineRun:
    """History (a row per logged step), config, summary, artifacts, and names of media files below ``folder/files``."""

    folder: Path
    id: str = ""
    name: str = ""
    group: str = ""
    job_type: str = ""
    history: list[dict[str, Any]] = field(default_factory=list)
    config: dict[str, Any] = field(default_factory=dict)
    summary: dict[str, Any] = field(default_factory=dict)
    files: list[str] = field(default_factory=list)
    artifacts: list[Artifact] = field(default_factory=list)

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


def _written(root: Path, timeout: float) -> list[Path]:
    """The files of the runs below ``root``, which another process writes."""
    end = time.monotonic() + timeout
    while not (found := list(root.glob("**/offline-run-*/run-*.wandb"))) and time.monotonic() < end:
        time.sleep(0.05)
    return found


def read_run(root: Path, timeout: float = 60.0) -> OfflineRun:
    """The only offline run below ``root``; finish it first."""
    (path,) = _written(root, timeout)
    return _read(path, _finished(path, timeout))


def read_parts(root: Path, ended: bool = False) -> list[OfflineRun]:
    """All that was logged below ``root`` in order of time; unless they ``ended``, one may have been killed."""
    paths = sorted(_written(root, 60.0), key=lambda path: path.stat().st_mtime)
    return [_read(path, _finished(path, 60.0) if ended else _records(path)) for path in paths]


def _read(path: Path, records: list[Record]) -> OfflineRun:
    run = OfflineRun(path.parent, id=path.stem.removeprefix("run-"))
    for record in records:
        kind = record.WhichOneof("record_type")
        if kind == "history":
            run.history.append(_items(record.history.item))
        elif kind == "run":
            run.config |= _items(record.run.config.update)
            assert record.run.run_id == run.id
            run.name, run.group, run.job_type = record.run.display_name, record.run.run_group, record.run.job_type
        elif kind == "config":
            run.config |= _items(record.config.update)
        elif kind == "summary":
            run.summary |= _items(record.summary.update)
        elif kind == "files":
            run.files += [item.path for item in record.files.files]
        elif kind == "artifact":
            run.artifacts.append(_artifact(record.artifact))
    return run


def _artifact(record: Any) -> Artifact:
    files = {entry.path: Path(entry.local_path) for entry in record.manifest.contents}
    return Artifact(record.name, record.type, list(record.aliases), json.loads(record.metadata or "{}"), files)


def _finished(path: Path, timeout: float) -> list[Record]:
    """All records, once the last of them is there: ``wandb.finish()`` may return before its service has written it."""
    deadline = time.monotonic() + timeout
    while time.monotonic() < deadline:
        with suppress(EOFError):
            records = [Record.FromString(data) for data in frames(path.read_bytes())]
            if any(record.HasField("exit") for record in records):
                return records
        time.sleep(0.02)
    raise TimeoutError(f"{path} has no exit record after {timeout:g} s: was the run finished?")


def _records(path: Path) -> list[Record]:
    """The records that are complete."""
    records = []
    with suppress(EOFError):
        for data in frames(path.read_bytes()):
            records.append(Record.FromString(data))
    return records


def frames(data: bytes) -> Iterator[bytes]:
    """The records of a log: blocks of 32 KiB, in which a record is one piece or several."""
    if len(data) < HEADER:
        raise EOFError("the log has not begun")
    assert data[:HEADER] == IDENT + struct.pack("<HB", MAGIC, VERSION), f"not a W&B log: {data[:HEADER]!r}"
    at, pieces = HEADER, b""
    while at < len(data):
        if (left := BLOCK - at % BLOCK) < HEADER:
            at += left
            continue
        if len(data) < at + HEADER:
            raise EOFError("the log is cut off")
        checksum, length, kind = struct.unpack_from("<IHB", data, at)
        piece = data[at + HEADER : at + HEADER + length]
        if len(piece) < length:
            raise EOFError("the log is cut off")
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


def wandb_at(patch: pytest.MonkeyPatch, home: Path) -> None:
    """Offline, without a key, and with everything W&B may write outside the run below ``home``."""
    patch.chdir(home)
    patch.setenv("WANDB_MODE", "offline")
    patch.delenv("WANDB_API_KEY", raising=False)
    for name in FOLDERS:
        patch.setenv(name, str(home / name.lower()))
