"""Keep a server, or a node, running on this host."""

from __future__ import annotations

import json
import os
import signal
import socket
import ssl
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lightning_fed.deploy import proxy
from lightning_fed.deploy.journal import LINES, Lines
from lightning_fed.deploy.places import SERVER, NodePlace, ServerPlace
from lightning_fed.deploy.supervisor import Supervisor, is_running

#: Seconds that parts of a federation may take to start.
STARTING = 120.0
#: Starts of the ServerApp without a new round, after which something is wrong that starting again does not mend.
MOST_FUTILE = 5


class DeployError(ValueError):
    """A federation cannot be brought up, or cannot go on; the message says where to look."""


class NodeHost:
    """Keeps the processes of a node running: SuperNode, the starter of ClientApps, and the process with the data."""

    def __init__(self, place: NodePlace, supervisor: Supervisor, prefix: str = "") -> None:
        environment = place.environment()
        for name in ("worker", "supernode", "superexec"):
            supervisor.add(f"{prefix}{name}", getattr(place, name)(), environment)


class ServerHost:
    """Keeps the processes of a server running, and its run going: SuperLink, proxy, the starter of the ServerApp.

    Args:
        place: the server's folder.
        supervisor: starts processes, and starts them again.
    """

    def __init__(self, place: ServerPlace, supervisor: Supervisor) -> None:
        self.place, self.supervisor = place, supervisor
        self._journal = Lines(place.folder / "journal" / LINES)
        self._run: str | None = None
        self._asked = 0.0  # when the last run was asked for
        self._known = len(self.entries)  # entries of the journal before that
        self._futile = 0

    @property
    def entries(self) -> list[dict[str, Any]]:
        """The journal, as far as it is written."""
        return self._journal.read()

    def up(self) -> None:
        """Start SuperLink and proxy, register nodes, and start the run."""
        if not self.place.nodes:
            raise DeployError(
                "The server has no nodes. Admit some: lightning-fed deploy admit"
                f" {self.place.folder} NAME node.pub --clients IDS"
            )
        if proxy.executable() is None:
            raise DeployError(
                "nginx is not installed. It keeps Flower's control API, which starts runs on all nodes, from the"
                " network. Install it: apt-get install nginx-light."
            )
        self._end_server_app()  # one that has survived a supervisor that was killed
        environment = self.place.environment()
        self.supervisor.add("superlink", self.place.superlink(), environment)
        self._wait_for_superlink()
        self.supervisor.add("proxy", self.place.proxy(), environment)
        self.register()
        self.supervisor.add("server-superexec", self.place.superexec(), environment)

    def register(self) -> None:
        """Have Flower admit the keys of nodes that it does not know yet, and take out those that were expelled."""
        place = self.place
        known = {node["id"]: node for node in place.nodes.values() if "id" in node}
        if known or place.expelled or place.registering:  # an earlier start may have ended at any point
            listed = self._flwr("supernode", "list", "here")["nodes"]
            there = {int(node["node-id"]) for node in listed if node["status"] != "unregistered"}
            for number in set(known) - there:  # the SuperLink's database was removed
                del known[number]["id"]
            strange = there - set(known) - set(place.expelled)
            if strange and "id" not in (own := place.nodes.get(place.registering, {"id": None})):
                own["id"] = strange.pop()
            for number in (set(place.expelled) & there) | strange:
                self._flwr("supernode", "unregister", str(number), "here")
            place.expelled, place.registering = [], ""
            place.save()
        for name, node in place.nodes.items():
            if "id" not in node:
                key = str((place.folder / node["key"]).absolute())
                place.registering = name
                place.save()
                node["id"] = int(self._flwr("supernode", "register", key, "here")["node-id"])
                place.registering = ""
                place.save()
        place.start()

    @property
    def is_over(self) -> bool:
        """Whether the run is complete."""
        entries = self.entries
        return bool(entries) and entries[-1]["event"] == "end"

    def tick(self) -> Iterator[dict[str, Any]]:
        """Look after everything once; yield what is new in the journal."""
        for task in self.supervisor.poll():
            if task.name == "superlink":
                self._wait_for_superlink()
                self._end_server_app()  # it would wait for a SuperLink that knows nothing of its calls
        entries = self.entries
        new, self._known = entries[self._known :], len(entries)
        yield from new
        if any(entry["event"] == "round" for entry in new):
            self._futile = 0
        over = self.is_over or any(entry["event"] == "error" for entry in new)
        if not over and not self._server_app_runs(entries):
            self._start_run()

    def _server_app_runs(self, entries: list[dict[str, Any]]) -> bool:
        starts = [entry for entry in entries if entry["event"] == "start"]
        if starts and starts[-1]["at"] >= self._asked:
            return self._is_ours(starts[-1]["process"])
        return self._run is not None and time.time() - self._asked < STARTING  # it is about to start

    def _start_run(self) -> None:
        if self._futile >= MOST_FUTILE:
            raise DeployError(
                f"The ServerApp has ended {MOST_FUTILE} times without a new round. Look at"
                f" {self.supervisor.logs / 'server-superexec.log'}."
            )
        self._futile += 1
        if self._run is not None:
            self._flwr("stop", self._run, "here", check=False)
        self._asked = time.time()
        self._run = str(self._flwr("run", str((self.place.folder / "app").absolute()), "here")["run-id"])

    def _end_server_app(self) -> None:
        starts = [entry for entry in self.entries if entry["event"] == "start"]
        if starts and self._is_ours(starts[-1]["process"]):
            os.kill(starts[-1]["process"], signal.SIGKILL)
        self._asked, self._run = time.time(), None

    def _is_ours(self, pid: int) -> bool:
        """Whether a process runs and is of this server, not another one that was given the same number since."""
        try:
            environment = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
        except OSError:
            return False
        return is_running(pid) and f"{SERVER}={self.place.folder.absolute()}".encode() in environment

    def _flwr(self, *words: str, check: bool = True) -> dict[str, Any]:
        """What a command of Flower's answers."""
        environment, command = self.place.environment(), self.place.flwr(*words)
        done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=STARTING)
        try:
            found: dict[str, Any] = json.loads(done.stdout)
        except ValueError:
            found = {}
        if check and (done.returncode or not found.get("success", True)):
            said = found.get("error-message") or (done.stdout + done.stderr).strip()[-500:]
            raise DeployError(f"flwr {words[0]} failed: {said}")
        return found

    def _wait_for_superlink(self) -> None:
        task, end = self.supervisor.tasks["superlink"], time.monotonic() + STARTING
        context = ssl.create_default_context(cafile=str(self.place.folder / "ca.crt"))
        while time.monotonic() < end:
            try:
                with socket.create_connection(("127.0.0.1", self.place.port), timeout=5) as plain:
                    with context.wrap_socket(plain, server_hostname="127.0.0.1"):
                        return
            except OSError:
                if not task.alive and not task.due:
                    self.supervisor.poll()
                time.sleep(0.1)
        raise DeployError(f"The SuperLink does not start. Look at {task.log}.")


def free_ports(count: int) -> list[int]:
    """Ports of this host that are free now.

    >>> len(set(free_ports(3)))
    3
    """
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
