"""Find processes that a test has left behind."""

from __future__ import annotations

import os
from pathlib import Path


def processes_of(folder: Path | str) -> list[str]:
    """The commands of processes, other than this one, that have a folder in their environment or command."""
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        try:
            known = (path / "environ").read_bytes() + (path / "cmdline").read_bytes()
            ours = str(folder).encode() in known and path.name != str(os.getpid())
            if ours and (path / "stat").read_text().rpartition(")")[2].split()[0] != "Z":
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode())
        except OSError:
            continue
    return found
