"""Who takes part, and in what process."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import IO, Any

from process import descendants, identity, machine_seconds, memory, peak_memory
from venvs import interpreter
from workloads import CACHE, Workload

HERE = Path(__file__).parent
SAMPLING = 0.2  # seconds between looks at the memory, which take up to
LOOKING = 0.02  # of the time
DISTURBED = 0.25  # cores in use by others, above which a round is not trusted


@dataclass(frozen=True)
class Contestant:
    """A way to play rounds."""

    name: str
    module: str  # in contestants/
    method: str = "FedADMM"
    workloads: tuple[str, ...] = ("W1", "W2", "W3")
    environment: str = ""  # in environments/; the project's own if empty
    needs_torch: bool = True
    slow_start: bool = False  # the first round is much slower than the others
    options: dict[str, Any] = field(default_factory=dict)


ONE, TWO = {"threads": 1}, {"threads": 2}
SMALL, LARGE = ("W1", "W3"), ("W2",)
LOOPS = ("loop, 1 thread", "loop, 2 threads")
IN_LOSS = "loop, penalty in the loss"
PEERS = ("Flower", "pfl-research", "FedLab")

#: In the order in which they begin: where memory does not do for all, those whose ratios matter most play in one heat.
CONTESTANTS = (
    Contestant(LOOPS[1], "loop", options=TWO),
    Contestant("ours", "ours", workloads=SMALL, options={**ONE, "compile": False}),
    Contestant(
        "ours, compiled", "ours", workloads=SMALL, slow_start=True, options={**ONE, "compile": True, "workers": 2}
    ),
    Contestant("ours, logging", "ours", workloads=("W1",), options={**ONE, "compile": False, "log_train": True}),
    Contestant(
        "ours, logging, compiled",
        "ours",
        workloads=("W1",),
        slow_start=True,
        options={**ONE, "compile": True, "workers": 2, "log_train": True},
    ),
    Contestant("ours", "ours", workloads=LARGE, options=ONE),
    Contestant("ours, 2 workers", "ours", workloads=LARGE, options={**ONE, "workers": 2}),
    Contestant("FedLab", "fedlab", "FedAvg", environment="fedlab", options=ONE),
    Contestant("FedJAX", "fedjax", "FedAvg", environment="fedjax", needs_torch=False, slow_start=True),
    Contestant(LOOPS[0], "loop", options=ONE),
    Contestant("Flower", "flower", "FedAvg", environment="flower", slow_start=True),
    Contestant("pfl-research", "pfl_research", "FedAvg", environment="pfl", options=ONE),
    Contestant("Trainer per client", "trainer", options=ONE),
    Contestant(IN_LOSS, "loop", options={**ONE, "in_loss": True}),
)


class FailedError(Exception):
    """A contestant's process ended; says why."""


class Player:
    """A contestant at work, until it is stopped.

    Raises:
        UnavailableError: its environment cannot be made.
        FailedError: it cannot play.
    """

    def __init__(self, contestant: Contestant, workload: Workload, patience: float) -> None:
        self.contestant, self.patience = contestant, patience
        python = interpreter(contestant.environment, contestant.needs_torch)
        threads = str(contestant.options.get("threads", 1))
        surroundings = {**os.environ, "OMP_NUM_THREADS": threads, "PYTHONWARNINGS": "ignore"}
        task = json.dumps({"workload": asdict(workload), "options": contestant.options})
        logs = CACHE / "logs"
        logs.mkdir(parents=True, exist_ok=True)
        self.log = logs / f"{workload.name}-{contestant.name.replace(' ', '-').replace(',', '')}.txt"
        began = time.perf_counter()
        with self.log.open("w") as errors:
            self.process = subprocess.Popen(
                [python, str(HERE / "turn.py"), contestant.module, task],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=errors,
                text=True,
                env=surroundings,
            )
        self.peak, self.turns = 0, list[dict[str, float]]()
        self.versions = self._hear()["versions"]
        self.seconds_to_ready = time.perf_counter() - began

    def play(self, patience: float = 30) -> dict[str, float]:
        """One round: its seconds, of the clock and of the CPU, and the CPU time of all others meanwhile.

        Before, it waits for others to finish, as long as its ``patience`` lasts.
        """
        wait_for_quiet(patience)
        self._signal(signal.SIGCONT)
        before = machine_seconds()
        with suppress(BrokenPipeError):  # it has ended: there is nothing to hear
            _open(self.process.stdin).write("go\n")
            _open(self.process.stdin).flush()
        facts = self._hear()
        others = machine_seconds() - before - facts["cpu"]
        self._signal(signal.SIGSTOP)  # some are busy even while they wait
        return {**facts, "others": max(0.0, others)}

    def stop(self) -> None:
        """End the process and whatever it leaves behind."""
        self._signal(signal.SIGCONT)
        started = [identity(pid) for pid in descendants(self.process.pid)]
        try:
            _open(self.process.stdin).close()
            self.process.wait(20)
        except (subprocess.TimeoutExpired, OSError):
            self.process.kill()
            self.process.wait()
        for pid, since in started:
            if identity(pid) == (pid, since):
                with suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGKILL)

    def _signal(self, number: int) -> None:
        """To the process and all it has started."""
        for pid in (self.process.pid, *descendants(self.process.pid)):
            with suppress(ProcessLookupError):
                os.kill(pid, number)

    def _hear(self) -> dict[str, Any]:
        """The next line of the process; its memory is watched meanwhile."""
        lines: list[str] = []
        listener = threading.Thread(target=lambda: lines.append(_open(self.process.stdout).readline()), daemon=True)
        listener.start()
        until, pause = time.monotonic() + self.patience, SAMPLING
        while listener.is_alive() and time.monotonic() < until:
            listener.join(pause)
            began = time.perf_counter()
            self.peak = max(self.peak, memory(self.process.pid), peak_memory(self.process.pid))
            pause = max(SAMPLING, (time.perf_counter() - began) / LOOKING)
        if listener.is_alive():
            self.stop()
            raise FailedError(f"took more than {self.patience:.0f} s")
        if not lines[0]:
            self.stop()
            raise FailedError(f"cannot run: {_last_words(self.log.read_text())}")
        facts: dict[str, Any] = json.loads(lines[0])
        return facts


def wait_for_quiet(patience: float = 30, look: float = 0.4) -> None:
    """Until nobody else uses the machine, but not for ever."""
    until = time.monotonic() + patience
    while time.monotonic() < until:
        before = machine_seconds()
        time.sleep(look)
        if machine_seconds() - before < DISTURBED * look:
            return


def _open(pipe: IO[str] | None) -> IO[str]:
    assert pipe is not None
    return pipe


def _last_words(log: str) -> str:
    """The last error, without the names of files."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]+(Error|Exception)\b", line)]
    return re.sub(r"\s*\(/[^)]*\)", "", (errors or lines or ["it said nothing"])[-1])[:300]


def machine() -> str:
    """Cores and processor."""
    names = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
    return f"{os.cpu_count()} cores, {names[0].split(':')[1].strip() if names else sys.platform}"
