"""A whole federation on this host: made, shown, taken down."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.cli.deploying.build import absolute, build_node
from lightning_fed.core.memory import ClientId
from lightning_fed.deploy.hosting import DeployError, NodeHost, ServerHost, free_ports
from lightning_fed.deploy.places import NodePlace, ServerPlace
from lightning_fed.deploy.supervisor import Supervisor

#: Seconds between looks at processes and the journal.
PAUSE = 0.2


def make_local(
    folder: Path,
    args: Sequence[str],
    nodes: int,
    share: Sequence[str],
    timeout: float = 600.0,
    patience: float = 3600.0,
    ids: Sequence[ClientId] | None = None,
) -> tuple[ServerPlace, list[NodePlace]]:
    """The folders of a server and its nodes; resumes where there are some.

    Client i of the config's data is at node i mod ``nodes``.
    """
    server_folder, node_folders = folder / "server", [folder / f"node-{i}" for i in range(nodes)]
    ports = free_ports(2 + nodes)
    where: dict[str, Any] = {"args": absolute(args), "cwd": os.getcwd()}
    made = server_folder / "server.json"
    if made.exists() and ServerPlace.load(server_folder).nodes:  # otherwise its making was interrupted
        server, places = _again(server_folder, node_folders, ports, where)
        return _settled(server, places, share, timeout, patience)
    clients = list(ids) if ids is not None else clients_of(args)
    if nodes > len(clients):
        raise DeployError(f"There are {len(clients)} clients for {nodes} nodes. Use at most {len(clients)} nodes.")
    server = ServerPlace(server_folder, listen=f"127.0.0.1:{ports[0]}", port=ports[1], **where)
    server.order = clients
    server.make(["127.0.0.1"])
    places = []
    for i, own in enumerate(node_folders):
        place = NodePlace(own, clients=clients[i::nodes], server=server.listen, port=ports[2 + i], **where)
        place.make((server_folder / "ca.crt").read_bytes())
        (server_folder / f"{own.name}.pub").write_bytes((own / "node.pub").read_bytes())
        server.nodes[own.name] = {"key": f"{own.name}.pub", "clients": place.clients}
        places.append(place)
    return _settled(server, places, share, timeout, patience)


def _settled(
    server: ServerPlace, nodes: list[NodePlace], share: Sequence[str], timeout: float, patience: float
) -> tuple[ServerPlace, list[NodePlace]]:
    """Note what the command says of waiting and sharing, which may change when it is repeated."""
    server.timeout, server.patience = timeout, patience
    server.save()
    for place in nodes:
        place.share = list(share)
        place.save()
    return server, nodes


def _again(
    server_folder: Path, node_folders: Sequence[Path], ports: Sequence[int], where: dict[str, Any]
) -> tuple[ServerPlace, list[NodePlace]]:
    """A federation that was interrupted, on other ports."""
    server, places = ServerPlace.load(server_folder), [NodePlace.load(own) for own in node_folders]
    if server.args != where["args"] or len(server.nodes) != len(places):
        raise DeployError(
            f"{server_folder.parent} holds another federation: {' '.join(server.args)} on {len(server.nodes)} nodes."
            " Give another --out, or remove the folder."
        )
    server.listen, server.port = f"127.0.0.1:{ports[0]}", ports[1]
    server.write_configs()
    for place, port in zip(places, ports[2:], strict=True):
        place.server, place.port = server.listen, port
    return server, places


def clients_of(args: Sequence[str]) -> list[ClientId]:
    """The clients of a config's data."""
    data: Any = build_node(args).datamodule
    data.prepare_data()
    data.setup("fit")
    return list(data.client_ids)


def run_local(
    server: ServerPlace, nodes: Sequence[NodePlace], tell: Callable[[dict[str, Any]], None] = lambda entry: None
) -> dict[str, Any]:
    """Bring a federation up, run it to its end, and take it down; return the last entry of its journal."""
    with Supervisor(server.folder.parent / "logs") as supervisor:
        for place in nodes:
            NodeHost(place, supervisor, f"{place.folder.name}-")
        host = ServerHost(server, supervisor)
        host.up()
        while True:
            for entry in host.tick():
                tell(entry)
                if entry["event"] in ("end", "error"):
                    return entry
            if host.is_over:
                return host.entries[-1]
            time.sleep(PAUSE)
