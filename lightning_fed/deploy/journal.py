"""The server's round journal: what is in it has happened, whatever is killed."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from lightning_fed.store import DamagedRecordError, Lease, durable

#: Name of the file with the lines.
LINES = "journal.jsonl"


class Journal:
    """Committed rounds of a run, one line each, durable; the state after a round is a sealed checkpoint beside it.

    A round has happened once its line is there. A checkpoint without a line, and a last line that was cut short by a
    kill, are as if they had never been written. Any other line that differs from its checksum is an error: a run is
    never begun anew, or from an earlier round, because of it. One process at a time holds a journal.

    Args:
        folder: made if it is not there.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> with Journal(folder) as journal:
    ...     journal.incarnation, journal.rounds_done, journal.last
    (1, 0, None)
    >>> with Journal(folder) as journal:
    ...     _ = journal.checkpoint_for(0).write_text("the state after round 0")
    ...     journal.commit(0, {"cohort": ["ann"]})
    ...     journal.incarnation, journal.rounds_done, journal.last.name
    (2, 1, 'round-000000.ckpt')
    """

    def __init__(self, folder: Path | str) -> None:
        self.folder = durable.make_folder(Path(folder))
        self._lease = Lease(self.folder)
        self._path = self.folder / LINES
        try:
            entries = self._read()
        except BaseException:  # whatever it is, another process must be able to open the journal
            self._lease.release()
            raise
        self._file: Any = self._path.open("ab", buffering=0) if self._path.exists() else durable.create(self._path)
        starts = [entry for entry in entries if entry["event"] == "start"]
        self.run: str = starts[0]["run"] if starts else secrets.token_hex(8)
        self.incarnation = len(starts) + 1
        self.rounds = [entry for entry in entries if entry["event"] == "round"]
        self._sweep()
        who = {"incarnation": self.incarnation, "process": os.getpid(), "at": time.time()}
        self._append({"event": "start", "run": self.run, **who})

    def _read(self) -> list[dict[str, Any]]:
        """All lines; a last one that was cut short is removed."""
        lines = Lines(self._path)
        entries = lines.read()
        if not entries and any(self.folder.glob("round-*.ckpt")):
            raise DamagedRecordError(self._path, "lines", "there are none, but checkpoints of rounds")
        if self._path.exists():
            durable.cut(self._path, lines.size)
        return entries

    @property
    def rounds_done(self) -> int:
        """Number of committed rounds."""
        return self.rounds[-1]["round"] + 1 if self.rounds else 0

    @property
    def last(self) -> Path | None:
        """The checkpoint of the last committed round."""
        return self.folder / self.rounds[-1]["checkpoint"] if self.rounds else None

    def checkpoint_for(self, round: int) -> Path:
        """Where the state after a round belongs."""
        return self.folder / f"round-{round:06d}.ckpt"

    def commit(self, round: int, facts: Mapping[str, Any]) -> None:
        """Commit a round whose checkpoint has been written; the checkpoint of the round before the last goes."""
        name = self.checkpoint_for(round).name
        entry = {"event": "round", "round": round, "checkpoint": name, "at": time.time(), **facts}
        self._append(entry)
        self.rounds.append(entry)
        if len(self.rounds) > 2 and (old := self.rounds[-3]["checkpoint"]) not in self._kept():
            durable.remove(self.folder / old)

    def _kept(self) -> set[str]:
        return {entry["checkpoint"] for entry in self.rounds[-2:]}

    def _sweep(self) -> None:
        """Remove checkpoints that a kill has left: older ones, and one whose line was never written."""
        for path in self.folder.glob("round-*.ckpt"):
            if path.name not in self._kept():
                durable.remove(path)

    def fail(self, reason: str) -> None:
        """Note why the run cannot go on by itself."""
        self._append({"event": "error", "reason": reason})

    def wait(self, round: int, nodes: Sequence[str]) -> None:
        """Note for which nodes the server waits; -1 is the roll call before round 0."""
        self._append({"event": "wait", "round": round, "nodes": list(nodes)})

    def end(self) -> None:
        """Note that the run is complete."""
        self._append({"event": "end"})

    def _append(self, entry: Mapping[str, Any]) -> None:
        durable.append(self._file.fileno(), self._path, [_line(entry)])

    def close(self) -> None:
        """Release the journal; may be called twice."""
        self._file.close()
        self._lease.release()

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _line(entry: Mapping[str, Any]) -> bytes:
    return json.dumps({**entry, "sha256": _digest(entry)}).encode() + b"\n"


def _digest(entry: Mapping[str, Any]) -> str:
    return sha256(json.dumps(entry).encode()).hexdigest()


class Lines:
    """The lines of a journal, which another process may be writing: every read parses what is new alone.

    >>> Lines(Path("not there")).read()
    []
    """

    def __init__(self, path: Path) -> None:
        self.path, self.size, self._entries = path, 0, list[dict[str, Any]]()

    def read(self) -> list[dict[str, Any]]:
        """All lines so far, without a last one that has no end yet; ``size`` is their length in bytes."""
        if self.path.exists():
            with self.path.open("rb") as file:
                file.seek(self.size)
                new = file.read().splitlines(keepends=True)
            for line in new:
                if not line.endswith(b"\n"):
                    break  # still being written, or cut short by a kill
                if (entry := _entry(line)) is None:
                    raise DamagedRecordError(self.path, f"line {len(self._entries) + 1}", "checksum differs")
                self._entries.append(entry)
                self.size += len(line)
        return list(self._entries)


def _entry(line: bytes) -> dict[str, Any] | None:
    try:
        entry = json.loads(line)
        claimed = entry.pop("sha256")
    except (ValueError, KeyError, AttributeError, TypeError):
        return None
    return entry if claimed == _digest(entry) and _line(entry) == line else None
