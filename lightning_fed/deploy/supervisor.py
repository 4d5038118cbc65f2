"""Start processes, restart those that end, and end them all."""

from __future__ import annotations

import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from lightning_fed.engines.orphans import ender

#: Seconds before a process that ended is started again, and the most to which they are doubled while it does not last.
DELAY, MOST_DELAY = 0.5, 5.0
#: Seconds that processes get to end by themselves.
GRACE = 5.0


@dataclass
class Task:
    """A process that is to run: its command, and how often it was started."""

    name: str
    command: Sequence[str]
    environment: Mapping[str, str]
    log: Path
    process: subprocess.Popen[bytes] | None = field(default=None, init=False)
    starts: int = field(default=0, init=False)
    due: float = field(default=0.0, init=False)
    begun: float = field(default=0.0, init=False)
    delay: float = field(default=DELAY, init=False)

    @property
    def alive(self) -> bool:
        """Whether the process is running."""
        return self.process is not None and self.process.poll() is None


class Supervisor:
    """Keeps processes running until it is closed; they end with it, also if it is killed.

    Args:
        logs: folder for what processes print, one file each.

    >>> import sys
    >>> from tempfile import mkdtemp
    >>> with Supervisor(Path(mkdtemp())) as supervisor:
    ...     task = supervisor.add("sleeper", [sys.executable, "-c", "import time; time.sleep(60)"], os.environ)
    ...     task.alive
    True
    >>> task.alive
    False
    """

    def __init__(self, logs: Path) -> None:
        logs.mkdir(parents=True, exist_ok=True)
        self.logs, self.tasks = logs, dict[str, Task]()

    def add(self, name: str, command: Sequence[str], environment: Mapping[str, str]) -> Task:
        """Start a process, which is started again whenever it ends."""
        task = self.tasks[name] = Task(name, list(command), environment, self.logs / f"{name}.log")
        self._start(task)
        return task

    def poll(self) -> list[Task]:
        """Start processes again that have ended, each after a pause; return those that were started."""
        started, now = [], time.monotonic()
        for task in self.tasks.values():
            if task.alive:
                continue
            if not task.due:
                lasting = now - task.begun > MOST_DELAY
                task.delay = DELAY if lasting else min(2 * task.delay, MOST_DELAY)
                task.due = now + (DELAY if task.starts == 1 else task.delay)
            elif now >= task.due:
                self._end_group(task, signal.SIGKILL)  # what the process has left behind
                self._start(task)
                started.append(task)
        return started

    def _start(self, task: Task) -> None:
        with task.log.open("ab") as log:
            task.process = _popen(task.command, task.environment, log)
        task.starts, task.due, task.begun = task.starts + 1, 0.0, time.monotonic()

    def close(self) -> None:
        """End all processes and whatever they have started."""
        tasks = list(reversed(self.tasks.values()))
        for task in tasks:
            self._end_group(task, signal.SIGTERM)
        end = time.monotonic() + GRACE
        while any(task.alive for task in tasks) and time.monotonic() < end:
            time.sleep(0.05)
        for task in tasks:
            self._end_group(task, signal.SIGKILL)
            if task.process is not None:
                task.process.wait()
        self.tasks.clear()

    @staticmethod
    def _end_group(task: Task, signum: int) -> None:
        if task.process is not None:
            with suppress(ProcessLookupError, PermissionError):
                os.killpg(task.process.pid, signum)

    def __enter__(self) -> Supervisor:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _popen(command: Sequence[str], environment: Mapping[str, str], log: IO[Any]) -> subprocess.Popen[bytes]:
    # nginx ends its worker, which would keep the port, only if it is asked to end
    ending = signal.SIGTERM if Path(command[0]).name == "nginx" else signal.SIGKILL
    # a group of its own, so that Ctrl-C in a terminal reaches the supervisor alone, and a group can be ended as a whole
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        preexec_fn=ender(ending),
    )


def is_running(pid: int) -> bool:
    """Whether a process is there and has not ended.

    >>> is_running(os.getpid())
    True
    """
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except (OSError, IndexError):
        return False
    return state not in ("Z", "X")
