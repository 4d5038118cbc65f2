"""Whatever is killed, the federation goes on to the bits of its simulation."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.timeout(900),
    pytest.mark.skipif("LIGHTNING_FED_DEPLOY" not in os.environ, reason="make test-deploy runs it"),
]


def kill_group(run: Any, *names: str) -> None:
    """Kill processes and whatever they have started, all at once."""
    for name in names:
        os.killpg(run.supervisor.tasks[name].process.pid, signal.SIGKILL)


def guard(run: Any, node: int) -> list[int]:
    """The key of the last instruction that a node has begun."""
    paths = list((run.nodes[node].folder / "states").glob("*/newest.json"))
    return json.loads(paths[0].read_text()) if paths else [-1] * 4


def states_written(run: Any, node: int) -> float:
    """When a node has last written states of its clients."""
    paths = (run.nodes[node].folder / "states").glob("*/states/index.sqlite3*")
    return max((path.stat().st_mtime_ns for path in paths), default=0)


def begun(run: Any, node: int) -> Callable[[], bool]:
    """Whether a node has begun an instruction since now."""
    before = guard(run, node)
    return lambda: guard(run, node) > before


def client_apps(run: Any) -> list[int]:
    """Processes that relay frames of this federation."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = path.read_bytes().split(b"\0")
            mine = str(run.folder).encode() in (path.parent / "environ").read_bytes()
        except OSError:
            continue
        if mine and any(word.endswith(b"flwr-clientapp") for word in words):
            found.append(int(path.parent.name))
    return found


def slowly(run: Any, on: bool) -> None:
    path = Path(os.environ["SLOW_FILE"])
    path.touch() if on else path.unlink(missing_ok=True)


def worker_before_its_commit(run: Any) -> None:
    slowly(run, True)
    run.until(begun(run, 0))
    written = states_written(run, 0)
    kill_group(run, "node-0-worker")
    assert states_written(run, 0) == written
    slowly(run, False)


def node_after_its_commit(run: Any) -> None:
    slowly(run, True)
    run.until(begun(run, 0))
    slowly(run, False)
    written, rounds = states_written(run, 0), len(run.digests)
    run.until(lambda: states_written(run, 0) > written)
    kill_group(run, "node-0-supernode", "node-0-superexec", "node-0-worker")
    run.tick()
    assert len(run.digests) == rounds  # the answer was not applied yet


def client_app(run: Any) -> None:
    slowly(run, True)
    run.until(begun(run, 0))
    for pid in run.until(lambda: client_apps(run)):
        os.kill(pid, signal.SIGKILL)
    slowly(run, False)


def server_app(run: Any) -> None:
    run.until(begun(run, 0))
    os.kill([entry for entry in run.entries if entry["event"] == "start"][-1]["process"], signal.SIGKILL)


def superlink(run: Any) -> None:
    run.until(begun(run, 0))
    kill_group(run, "superlink")


@pytest.mark.parametrize(
    "kill",
    [worker_before_its_commit, node_after_its_commit, client_app, server_app, superlink],
    ids=lambda f: f.__name__,
)
def test_a_federation_goes_on_to_the_same_bits_after_a_kill(kill: Any, federation: Callable[..., Any]) -> None:
    run = federation("FedADMM", rounds=3, nodes=2, model="slow_model.SlowMLP", timeout=20.0)
    expected = run.simulated()
    run.up()
    run.until(lambda: len(run.digests) == 1)
    begin = time.monotonic()
    kill(run)
    run.until(lambda: len(run.digests) == 2)
    took = time.monotonic() - begin
    run.until(run.has_ended)
    ordinary = [entry for entry in run.entries if entry["event"] == "round"][-1]["metrics"]["seconds"]
    print(f"\n{kill.__name__}: the round took {took:.1f} s, an ordinary one {ordinary:.1f} s")
    assert run.digests == expected
