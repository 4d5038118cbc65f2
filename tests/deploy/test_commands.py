"""The commands of docs/howto/deploy.md, as separate processes."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.processes import processes_of

from lightning_fed.deploy.hosting import free_ports

pytestmark = [
    pytest.mark.deploy,
    pytest.mark.usefixtures("nginx"),
    pytest.mark.timeout(600),
    pytest.mark.skipif("LIGHTNING_FED_DEPLOY" not in os.environ, reason="make test-deploy runs it"),
]


def command(*words: str) -> list[str]:
    return [sys.executable, "-m", "lightning_fed", "deploy", *words]


@pytest.fixture
def started() -> Iterator[Callable[..., subprocess.Popen[str]]]:
    running: list[subprocess.Popen[str]] = []

    def start(*words: str) -> subprocess.Popen[str]:
        pipe, out = subprocess.PIPE, subprocess.STDOUT
        running.append(subprocess.Popen(command(*words), stdout=pipe, stderr=out, text=True))
        return running[-1]

    yield start
    for process in running:
        process.terminate()
        process.wait(30)
        assert process.stdout is not None
        process.stdout.close()


def read_until(process: subprocess.Popen[str], pattern: str) -> list[str]:
    """Lines of a process up to one with a pattern."""
    assert process.stdout is not None
    lines = []
    for line in process.stdout:
        lines.append(line)
        if re.search(pattern, line):
            return lines
    raise AssertionError("".join(lines))


def test_a_federation_that_is_terminated_leaves_nothing_running_and_resumes_to_the_same_bits(
    federation: Callable[..., Any], started: Callable[..., Any], tmp_path: Path
) -> None:
    run = federation("FedADMM", rounds=3, nodes=2)  # makes the folder
    expected, args = run.simulated(), ["local", "--nodes", "2", "--out", str(tmp_path / "fed"), *run.args]
    first = started(*args)
    lines = read_until(first, "^round 0")
    first.send_signal(signal.SIGTERM)
    rest = first.communicate(timeout=60)[0]
    assert first.returncode == 143
    assert "Repeat the command to resume" in rest
    end = time.monotonic() + 10
    while processes_of(tmp_path / "fed") and time.monotonic() < end:
        time.sleep(0.1)
    assert processes_of(tmp_path / "fed") == []
    second = started(*args)
    lines += read_until(second, "complete")
    assert second.wait(60) == 0
    found = dict(re.findall(r"round (\d+):.* x_bar (\w+)", "".join(lines)))
    assert found == {str(i): digest[:12] for i, digest in enumerate(expected)}


def test_server_and_clients_on_their_own_follow_the_guide(
    federation: Callable[..., Any], started: Callable[..., Any], tmp_path: Path
) -> None:
    run = federation("FedADMM", rounds=2, nodes=2)  # for its config
    fed, (listen, port, *others) = tmp_path / "fed2", free_ports(4)
    server = str(fed / "server")
    places = ["--listen", f"127.0.0.1:{listen}", "--port", str(port), "--host", "127.0.0.1"]
    subprocess.run(command("init", "server", server, *places, *run.args), check=True)
    expected, names = run.simulated(), {"a": "f_00000,f_00001,f_00002", "b": "f_00003,f_00004,f_00005"}
    for (name, clients), own in zip(names.items(), others, strict=True):
        folder = str(fed / name)
        known = [
            "--server",
            f"127.0.0.1:{listen}",
            "--ca",
            f"{server}/ca.crt",
            "--clients",
            clients,
            "--port",
            str(own),
        ]
        subprocess.run(command("init", "client", folder, *known, "--clients", clients, *run.args), check=True)
        subprocess.run(command("admit", server, name, f"{folder}/node.pub", "--clients", clients), check=True)
        started("client", folder)
    lines = read_until(started("server", server), "complete")
    assert re.findall(r"x_bar (\w+)", "".join(lines)) == [digest[:12] for digest in expected]
    twice = subprocess.run(command("init", "server", server, *places), capture_output=True, text=True)
    assert (twice.returncode, twice.stderr.count("\n")) == (2, 1)
    assert "is there already" in twice.stderr
    subprocess.run(command("expel", server, "b"), check=True)
    text = (fed / "server" / "lightning-fed-server.service").read_text()
    assert f'deploy server "{server}"' in text
