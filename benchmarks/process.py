"""CPU time and memory of a process with everything it started, from /proc."""

from __future__ import annotations

import os
import resource
from collections.abc import Iterator
from pathlib import Path

TICK = os.sysconf("SC_CLK_TCK")
PROC = Path("/proc")


def descendants(pid: int) -> Iterator[int]:
    """Living children, their children and so on."""
    for task in (PROC / str(pid) / "task").glob("*/children"):
        for child in map(int, _read(task).split()):
            yield child
            yield from descendants(child)


def cpu_seconds() -> float:
    """Of this process, of those it has waited for, and of its living descendants, with those they have waited for."""
    usages = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    own = sum(usage.ru_utime + usage.ru_stime for usage in usages)
    return own + sum(_ticks(pid) for pid in descendants(os.getpid())) / TICK


def machine_seconds() -> float:
    """CPU time that all processes of the machine have used since it was started."""
    user, nice, system = _read(PROC / "stat").split()[1:4]
    return (int(user) + int(nice) + int(system)) / TICK


def available_memory() -> int:
    """Bytes that could be had without swapping."""
    lines = _read(PROC / "meminfo").splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith("MemAvailable:"))


def identity(pid: int) -> tuple[int, str]:
    """Of a process, not of another that gets its number later: with the time when it was started."""
    return pid, "".join(_read(PROC / str(pid) / "stat").rpartition(")")[2].split()[19:20])


def memory(pid: int) -> int:
    """Bytes in use: what all these processes hold together, shared pages counted once, and the files of the first."""
    total = 1024 * int(_status(pid).get("RssFile", "0 kB").split()[0])
    for member in (pid, *descendants(pid)):
        for line in _read(PROC / str(member) / "smaps_rollup").splitlines():
            if line.startswith(("Pss_Anon:", "Pss_Shmem:")):
                total += 1024 * int(line.split()[1])
    return total


def peak_memory(pid: int) -> int:
    """The largest resident size this one process has had, in bytes."""
    return 1024 * int(_status(pid).get("VmHWM", "0 kB").split()[0])


def _ticks(pid: int) -> int:
    fields = _read(PROC / str(pid) / "stat").rpartition(")")[2].split()
    return sum(map(int, fields[11:15]))  # user and system, own and of children waited for


def _status(pid: int) -> dict[str, str]:
    pairs = (line.split(":", 1) for line in _read(PROC / str(pid) / "status").splitlines())
    return {name: value.strip() for name, value in pairs}


def _read(path: Path) -> str:
    try:
        return path.read_text()
    except OSError:  # it has ended meanwhile
        return ""
