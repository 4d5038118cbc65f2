"""The server's round journal: what is in it has happened, whatever is killed."""

from __future__ import annotations

import json
import os
import secrets
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lightning_fed.store import Lease, durable


class Journal:
    """Committed rounds of a run, one line each, durable; the state after a round is a sealed checkpoint beside it.

    A round has happened once its line is there. A checkpoint without a line, and a line that was cut short by a kill,
    are as if they had never been written. One process at a time holds a journal.

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
        self._path = self.folder / "journal.jsonl"
        entries = read_entries(self._path)
        if self._path.exists():
            durable.cut(self._path, sum(len(_line(entry)) for entry in entries))
            self._file: Any = self._path.open("ab", buffering=0)
        else:
            self._file = durable.create(self._path)
        starts = [entry for entry in entries if entry["event"] == "start"]
        self.run: str = starts[0]["run"] if starts else secrets.token_hex(8)
        self.incarnation = len(starts) + 1
        self.rounds = [entry for entry in entries if entry["event"] == "round"]
        who = {"incarnation": self.incarnation, "process": os.getpid(), "at": time.time()}
        self._append({"event": "start", "run": self.run, **who})

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
        for old in self.rounds[:-2]:
            if old["checkpoint"] not in {kept["checkpoint"] for kept in self.rounds[-2:]}:
                durable.remove(self.folder / old["checkpoint"])

    def fail(self, reason: str) -> None:
        """Note why the run cannot go on by itself."""
        self._append({"event": "error", "reason": reason})

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
    return json.dumps(entry).encode() + b"\n"


def read_entries(path: Path) -> list[dict[str, Any]]:
    """The lines of a journal, up to one that a kill has cut short.

    >>> read_entries(Path("not there"))
    []
    """
    if not path.exists():
        return []
    entries = []
    for line in path.read_bytes().splitlines(keepends=True):
        try:
            entry = json.loads(line)
        except ValueError:
            break
        if not line.endswith(b"\n") or _line(entry) != line:
            break
        entries.append(entry)
    return entries
