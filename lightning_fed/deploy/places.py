"""The folders of a federation: what the server keeps, what a node keeps."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import count
from pathlib import Path
from typing import Any

from lightning_fed.core.memory import ClientId
from lightning_fed.deploy import pki, proxy
from lightning_fed.deploy.journal import LINES, Lines
from lightning_fed.store import durable
from lightning_fed.store.identity import name_of

#: Environment variables with the folder of a server, and of a node.
SERVER, NODE = "LIGHTNING_FED_SERVER", "LIGHTNING_FED_NODE"

#: Name of the settings with which a server was started.
RUNNING = "running"

_PROJECT = """\
[build-system]
requires = ["hatchling"]
build-backend = "hatchling.build"

[project]
name = "lightning-fed-app"
version = "1.0.0"
description = "Relays frames of lightning-fed"
license = "Apache-2.0"
dependencies = []

[tool.flwr.app]
publisher = "lightning-fed"

[tool.flwr.app.components]
serverapp = "lightning_fed_app.server:app"
clientapp = "lightning_fed_app.client:app"

[tool.flwr.app.config]
"""
_SERVER_APP = '"""The ServerApp."""\n\nfrom lightning_fed.cli.deploying import server_app\n\napp = server_app.app\n'


@dataclass
class ServerPlace:
    """A server's folder, and its settings in ``server.json``.

    Args:
        folder: where everything is.
        args: arguments of ``lightning-fed fit``: the config and overrides.
        listen: address and port on which nodes are served, by the proxy.
        port: the SuperLink's port, on this host only.
        nodes: the registered nodes by name: the file of their public key, their clients, and Flower's number of them.
        order: ids of all clients in the order in which cohorts are drawn; that of the nodes by default.
        timeout, patience: seconds, as in :class:`~lightning_fed.deploy.link.Patience`.
        body_mb: most megabytes of a request.
        cwd: where relative paths in ``args`` begin.
        expelled: Flower's numbers of nodes whose keys are to be taken out.
        spent: keys of nodes that were expelled; Flower registers none of them again.
        registering: the node whose key was last given to Flower; its number may not have been noted.
        weights: a checkpoint whose model a new run begins with; by default that of the config.
    """

    folder: Path
    args: list[str] = field(default_factory=list)
    listen: str = "0.0.0.0:9092"
    port: int = 9093
    cwd: str = ""
    nodes: dict[str, dict[str, Any]] = field(default_factory=dict, init=False)
    order: list[ClientId] = field(default_factory=list, init=False)
    timeout: float = field(default=600.0, init=False)
    patience: float = field(default=3600.0, init=False)
    body_mb: int = field(default=proxy.BODY_MB, init=False)
    expelled: list[int] = field(default_factory=list, init=False)
    spent: list[str] = field(default_factory=list, init=False)
    registering: str = field(default="", init=False)
    weights: str = field(default="", init=False)

    @classmethod
    def load(cls, folder: Path | str) -> ServerPlace:
        """The server of a folder that ``lightning-fed deploy init server`` made."""
        place = cls(Path(folder))
        vars(place).update(_settings(Path(folder), "server"))
        return place

    @classmethod
    def running(cls, folder: Path | str) -> ServerPlace:
        """The server as it was started: nodes that are admitted or expelled later count from its next start on."""
        place = cls(Path(folder))
        vars(place).update(_settings(Path(folder), RUNNING))
        return place

    def save(self) -> None:
        """Write the settings."""
        _save(self, "server")

    def start(self) -> None:
        """Note the settings with which the server runs."""
        _save(self, RUNNING)

    def make(self, hosts: Sequence[str]) -> None:
        """Make folder, certificates, secret, the proxy's config and the app that is sent to nodes."""
        durable.make_folder(self.folder).chmod(0o700)
        pki.make_certificates(self.folder, list(dict.fromkeys([*hosts, "localhost", "127.0.0.1"])))
        pki.make_secret(self.folder / "superexec.secret")
        self.write_configs()
        self.save()

    def write_configs(self) -> None:
        """Write the files that follow from the settings."""
        (self.folder / "nginx.conf").write_text(proxy.config(self.folder, self.listen, self.port, self.body_mb))
        app = self.folder / "app" / "lightning_fed_app"
        app.mkdir(parents=True, exist_ok=True)
        (app.parent / "pyproject.toml").write_text(_PROJECT)
        (app.parent / "README.md").write_text("# lightning-fed-app\n")
        (app / "__init__.py").write_text('"""Sent to nodes by lightning-fed."""\n')
        (app / "server.py").write_text(_SERVER_APP)
        (app / "client.py").write_text((Path(__file__).parent / "relay.py").read_text())
        flower = self.folder / "flwr"
        flower.mkdir(exist_ok=True)
        address, ca = f"127.0.0.1:{self.port}", self.folder.absolute() / "ca.crt"
        text = f'[superlink]\ndefault = "here"\n\n[superlink.here]\naddress = "{address}"\nroot-certificates = "{ca}"\n'
        (flower / "config.toml").write_text(text)

    def admit(self, name: str, key: bytes, clients: Sequence[ClientId]) -> None:
        """Have a node's key registered at the next start; the node may speak for these clients."""
        taken = {client: other for other, node in self.nodes.items() for client in node["clients"]}
        if name in self.nodes or any(client in taken for client in clients):
            named = [f"client {client!r} is at node {taken[client]!r}" for client in clients if client in taken]
            raise ValueError(f"Node {name!r} cannot be admitted: {[*named, 'the name is taken'][0]}. Expel that first.")
        self._check_key(key)
        path = self.folder / f"{name_of(name.encode())}.pub"
        path.write_bytes(key)
        self.nodes[name] = {"key": path.name, "clients": list(clients)}
        self.save()

    def _check_key(self, key: bytes) -> None:
        pki.check_public(key)
        text = _key_of(key)
        same = [name for name, node in self.nodes.items() if _key_of((self.folder / node["key"]).read_bytes()) == text]
        if same or text in self.spent:
            whose = f"is that of node {same[0]!r}" if same else "was expelled, and Flower registers no key twice"
            raise ValueError(f"This key {whose}. Make another one: lightning-fed deploy init client, in a new folder.")

    def expel(self, name: str) -> None:
        """Have a node's key taken out at the next start, and its clients left out of the next run."""
        if name not in self.nodes:
            raise ValueError(f"There is no node {name!r}. There are {', '.join(self.nodes) or 'none'}.")
        node = self.nodes.pop(name)
        self.order = [client for client in self.order if client not in node["clients"]]
        self.spent.append(_key_of((self.folder / node["key"]).read_bytes()))
        if "id" in node:
            self.expelled.append(node["id"])
        self.save()

    def begin_anew(self) -> None:
        """Put the journal aside; the next run begins with its last model, and with clients that remember nothing."""
        journal = self.folder / "journal"
        if not journal.exists():
            return
        rounds = [entry for entry in Lines(journal / LINES).read() if entry["event"] == "round"]
        aside = next(path for i in count(1) if not (path := self.folder / f"journal-{i}").exists())
        durable.rename(journal, aside)
        if rounds:
            self.weights = str((aside / rounds[-1]["checkpoint"]).absolute())
        self.save()

    @property
    def owners(self) -> dict[ClientId, int]:
        """Flower's number of each client's node."""
        return {client: node["id"] for node in self.nodes.values() for client in node["clients"] if "id" in node}

    def superlink(self) -> list[str]:
        """The command of the SuperLink."""
        where = self.folder.absolute()
        tls = ["--ssl-ca-certfile", f"{where}/ca.crt", "--ssl-certfile", f"{where}/server.crt"]
        tls += ["--ssl-keyfile", f"{where}/server.key", "--enable-supernode-auth"]
        isolated = ["--isolation", "process", "--superexec-auth-secret-file", f"{where}/superexec.secret"]
        here = ["--host", "127.0.0.1", "--port", str(self.port), "--database", f"{where}/superlink.db"]
        return [
            sys.executable,
            "-m",
            "lightning_fed.deploy.superlink",
            *tls,
            *isolated,
            *here,
            "--disable-runtime-dependency-installation",
        ]

    def superexec(self) -> list[str]:
        """The command of the process that starts the ServerApp."""
        return _superexec(self.folder, self.port, self.folder / "ca.crt")

    def proxy(self) -> list[str]:
        """The command of the proxy."""
        where = self.folder.absolute()
        return [str(proxy.executable()), "-e", "stderr", "-p", str(where), "-c", f"{where}/nginx.conf"]

    def flwr(self, *words: str) -> list[str]:
        """A command of Flower's own command line, with JSON as its output."""
        return [_tool("flwr"), *words, "--format", "json"]

    def environment(self) -> dict[str, str]:
        """The environment of the server's processes."""
        return _environment(self.folder, SERVER)


@dataclass
class NodePlace:
    """A node's folder, and its settings in ``node.json``.

    Args:
        folder: where everything is, clients' states among it.
        args: arguments of ``lightning-fed fit``: the config with this node's data, and overrides.
        clients: ids of the node's clients; all that the data have if there are none here.
        server: address and port of the server's proxy.
        port: of the SuperNode, on this host only.
        share: names of metrics that may leave the node.
        cwd: where relative paths in ``args`` begin.
    """

    folder: Path
    args: list[str] = field(default_factory=list)
    clients: list[ClientId] = field(default_factory=list)
    server: str = "127.0.0.1:9092"
    port: int = 9094
    share: list[str] = field(default_factory=lambda: ["loss"])
    cwd: str = ""

    @classmethod
    def load(cls, folder: Path | str) -> NodePlace:
        """The node of a folder that ``lightning-fed deploy init client`` made."""
        return cls(Path(folder), **_settings(Path(folder), "node"))

    def make(self, ca: bytes) -> None:
        """Make folder, key and secret; ``ca`` is the server's certificate authority."""
        durable.make_folder(self.folder).chmod(0o700)
        (self.folder / "server_ca.crt").write_bytes(ca)
        pki.make_node_key(self.folder / "node.key")
        pki.make_secret(self.folder / "superexec.secret")
        pki.make_certificates(self.folder / "local", ["127.0.0.1", "localhost"])
        self.save()

    def save(self) -> None:
        """Write the settings."""
        _save(self, "node")

    def supernode(self) -> list[str]:
        """The command of the SuperNode."""
        where = self.folder.absolute()
        server = ["--superlink", self.server, "--root-certificates", f"{where}/server_ca.crt"]
        key = ["--auth-supernode-private-key", f"{where}/node.key"]
        here = ["--host", "127.0.0.1", "--port", str(self.port), "--ssl-ca-certfile", f"{where}/local/ca.crt"]
        here += ["--ssl-certfile", f"{where}/local/server.crt", "--ssl-keyfile", f"{where}/local/server.key"]
        isolated = ["--isolation", "process", "--superexec-auth-secret-file", f"{where}/superexec.secret"]
        return [_tool("flower-supernode"), *server, *key, *here, *isolated]

    def superexec(self) -> list[str]:
        """The command of the process that starts ClientApps."""
        return _superexec(self.folder, self.port, self.folder / "local" / "ca.crt")

    def worker(self) -> list[str]:
        """The command of the process with the node's data."""
        return [sys.executable, "-m", "lightning_fed.cli.deploying.node_process", str(self.folder.absolute())]

    def environment(self) -> dict[str, str]:
        """The environment of the node's processes."""
        return _environment(self.folder, NODE)


def _key_of(content: bytes) -> str:
    """A public key without its comment."""
    return " ".join(content.decode(errors="replace").split()[:2])


def _superexec(folder: Path, port: int, ca: Path) -> list[str]:
    where = ["--runtime-api-address", f"127.0.0.1:{port}", "--root-certificates", str(ca.absolute())]
    secret = ["--superexec-auth-secret-file", str(folder.absolute() / "superexec.secret")]
    return [_tool("flower-superexec"), *where, *secret]


def _tool(name: str) -> str:
    """A command that is installed beside this Python."""
    return str(Path(sys.executable).parent / name)


def _environment(folder: Path, variable: str) -> dict[str, str]:
    """No telemetry, no look for updates, nothing installed at run time, no folder of Flower outside our own."""
    known = {variable: str(folder.absolute()), "FLWR_HOME": str(folder.absolute() / "flwr")}
    off = {"FLWR_TELEMETRY_ENABLED": "0", "FLWR_DISABLE_UPDATE_CHECK": "1"}
    off["FLWR_DISABLE_RUNTIME_DEPENDENCY_INSTALLATION"] = "1"
    quick = {"FLWR_SUPEREXEC_TASK_POLL_INTERVAL": "0.1", "PYTHONUNBUFFERED": "1"}
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ.get('PATH', '')}"
    return {**os.environ, **known, **off, **quick, "PATH": path}


def _settings(folder: Path, kind: str) -> dict[str, Any]:
    path = folder / f"{kind}.json"
    if not path.exists():
        other = "client" if kind == "node" else kind
        raise FileNotFoundError(f"{path} is not there. Make it with: lightning-fed deploy init {other} {folder}")
    found: dict[str, Any] = json.loads(path.read_text())
    return found


def _save(place: ServerPlace | NodePlace, kind: str) -> None:
    content: Mapping[str, Any] = {name: value for name, value in asdict(place).items() if name != "folder"}
    durable.write(place.folder / f"{kind}.json", [json.dumps(content, indent=2).encode()])
