"""``lightning-fed deploy``: run the same config on real clients, with Flower as the engine."""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lightning_fed.cli.interruption import resumable
from lightning_fed.cli.refusals import OneLineParser
from lightning_fed.core.memory import ClientId

DESCRIPTION = """\
Run the config of a simulation on real clients (docs/howto/deploy.md). `local` brings a whole federation up on this
host: certificates, keys of nodes, proxy, SuperLink, SuperNodes and the run; shows rounds as they come, and takes
everything down again. Repeat an interrupted command to resume it."""
EPILOG = """\
examples:
  lightning-fed deploy local --nodes 3 --config configs/synthetic_fedadmm.yaml --trainer.max_epochs=5
  lightning-fed deploy init server SERVER --host fed.example.org --config my.yaml
  lightning-fed deploy init client CLIENT --server fed.example.org:9092 --ca ca.crt --clients ann --config mine.yaml
  lightning-fed deploy admit SERVER ann CLIENT/node.pub --clients ann
  lightning-fed deploy server SERVER      # on the server's host
  lightning-fed deploy client CLIENT      # on the client's host"""

#: Starts of a SuperNode after which its operator is told what may be wrong: it ends without a word when it is refused.
UNWELCOME = 4
_WHY_UNWELCOME = (
    "The SuperNode ends again and again. Has the server's operator admitted its key, and started the server since? Do"
    " the clocks of both hosts agree to five seconds?"
)


def main(args: list[str] | None = None) -> None:
    parser = _parser()
    asked, others = parser.parse_known_args(sys.argv[2:] if args is None else args)
    if find_spec("flwr") is None:
        parser.error("flwr is not installed. Install it: pip install 'lightning-fed[flower]'")
    if others and asked.command not in ("local", "init"):
        parser.error(f"unrecognized arguments: {' '.join(others)}")
    with resumable():
        asked.go(asked, others)


def _parser() -> argparse.ArgumentParser:
    parser = OneLineParser(
        prog="lightning-fed deploy",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    commands = parser.add_subparsers(dest="command", required=True, parser_class=OneLineParser)
    local = commands.add_parser("local", help="a whole federation on this host", allow_abbrev=False)
    local.add_argument("--nodes", type=_whole, default=3, help="number of nodes (default: %(default)s)")
    local.add_argument("--out", type=Path, default=Path("runs/deploy"), help="folder (default: %(default)s)")
    _add_share(local)
    _add_patience(local)
    local.set_defaults(go=_local)
    init = commands.add_parser("init", help="make the folder of a server or a client", allow_abbrev=False)
    kinds = init.add_subparsers(dest="kind", required=True, parser_class=OneLineParser)
    server = kinds.add_parser("server", allow_abbrev=False)
    server.add_argument("folder", type=Path)
    server.add_argument("--host", action="append", required=True, help="name or address of the server; repeatable")
    server.add_argument("--listen", default="0.0.0.0:9092", help="where nodes are served (default: %(default)s)")
    server.add_argument("--port", type=_whole, default=9093, help="of the SuperLink, on this host (default: 9093)")
    _add_patience(server)
    server.set_defaults(go=_init_server)
    client = kinds.add_parser("client", allow_abbrev=False)
    client.add_argument("folder", type=Path)
    client.add_argument("--server", required=True, metavar="HOST:PORT", help="the server's address")
    client.add_argument("--ca", type=Path, required=True, help="the server's ca.crt")
    client.add_argument(
        "--clients", type=_ids, required=True, help="ids of the clients at this node, as 1,2 or ann,bob"
    )
    client.add_argument("--port", type=_whole, default=9094, help="of the SuperNode, on this host (default: 9094)")
    _add_share(client)
    client.set_defaults(go=_init_client)
    admit = commands.add_parser("admit", help="register a node's key and its clients", allow_abbrev=False)
    admit.add_argument("folder", type=Path, help="the server's folder")
    admit.add_argument("name", help="any name for the node")
    admit.add_argument("key", type=Path, help="the node's public key, node.pub")
    admit.add_argument("--clients", type=_ids, required=True, help="ids of the clients that it speaks for")
    admit.set_defaults(go=_admit)
    expel = commands.add_parser("expel", help="take a node's key and its clients out", allow_abbrev=False)
    expel.add_argument("folder", type=Path, help="the server's folder")
    expel.add_argument("name", help="the node's name")
    expel.set_defaults(go=_expel)
    for name, go, what in (("server", _server, "run a server"), ("client", _client, "run a node")):
        run = commands.add_parser(name, help=what, allow_abbrev=False)
        run.add_argument("folder", type=Path)
        run.set_defaults(go=go)
        if name == "server":
            run.add_argument("--new", action="store_true", help="begin a new run, from the last run's model")
    return parser


def _add_share(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--share",
        type=lambda text: [name for name in text.split(",") if name],
        default=["loss"],
        metavar="NAMES",
        help="metrics that may leave a node: loss, and what the module logs in training (default: loss)",
    )


def _add_patience(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--timeout", type=_seconds, default=600.0, help="seconds of one exchange (default: 600)")
    parser.add_argument(
        "--patience",
        type=_seconds,
        default=3600.0,
        help="seconds until missing clients count as failed (default: 3600)",
    )


def _local(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.cli.deploying.local import make_local, run_local
    from lightning_fed.store import Lease

    with Lease(asked.out):
        server, nodes = make_local(asked.out, others, asked.nodes, asked.share, asked.timeout, asked.patience)
        clients = sum(len(node["clients"]) for node in server.nodes.values())
        where = f"Server at {server.listen}, {asked.nodes} nodes with {clients} clients; logs: {asked.out / 'logs'}"
        print(where, flush=True)
        _conclude(run_local(server, nodes, _tell))


def _tell(entry: dict[str, Any]) -> None:
    """Print an event of the journal."""
    if entry["event"] == "start":
        print(f"Run {entry['run']}, start {entry['incarnation']} of the server.", flush=True)
    elif entry["event"] == "wait":
        when = "the roll call" if entry["round"] < 0 else f"round {entry['round']}"
        print(f"{when}: waiting for {', '.join(entry['nodes'])}; look at the node's logs.", flush=True)
    elif entry["event"] == "round":
        metrics = entry["metrics"]
        loss = metrics.get("local_loss", math.nan)
        failed = f", {len(entry['failed'])} failed" if entry["failed"] else ""
        took = f"{metrics['clients']:.0f} clients{failed}, {metrics['seconds']:.1f} s"
        print(f"round {entry['round']}: local loss {loss:.4f}, {took}, x_bar {entry['x_bar'][:12]}", flush=True)


def _conclude(entry: dict[str, Any]) -> None:
    from lightning_fed.deploy.hosting import DeployError

    if entry["event"] == "error":
        raise DeployError(f"The run has ended. {entry['reason']}")
    print("The run is complete.", flush=True)


def _init_server(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.cli.deploying.build import absolute
    from lightning_fed.deploy.places import ServerPlace
    from lightning_fed.deploy.units import unit

    _refuse_existing(asked.folder, "server.json")
    place = ServerPlace(asked.folder, absolute(others), asked.listen, asked.port, cwd=str(Path.cwd()))
    place.timeout, place.patience = asked.timeout, asked.patience
    place.make(asked.host)
    path = asked.folder / "lightning-fed-server.service"
    path.write_text(unit("server", asked.folder, cwd=place.cwd))
    print(f"Give {asked.folder / 'ca.crt'} to every client; admit their keys; then start {path}, or:")
    print(f"  lightning-fed deploy server {asked.folder}")


def _init_client(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.cli.deploying.build import absolute
    from lightning_fed.deploy.places import NodePlace
    from lightning_fed.deploy.units import unit

    _refuse_existing(asked.folder, "node.json")
    args, cwd = absolute(others), str(Path.cwd())
    place = NodePlace(asked.folder, args, asked.clients, asked.server, asked.port, asked.share, cwd)
    place.make(asked.ca.read_bytes())
    path = asked.folder / "lightning-fed-client.service"
    path.write_text(unit("client", asked.folder, cwd=cwd))
    print(f"Give {asked.folder / 'node.pub'} to the server's operator; then start {path}, or:")
    print(f"  lightning-fed deploy client {asked.folder}")


def _refuse_existing(folder: Path, name: str) -> None:
    if (folder / name).exists():
        raise ValueError(f"{folder / name} is there already. Remove the folder, or use another one.")


def _admit(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.deploy.places import ServerPlace

    ServerPlace.load(asked.folder).admit(asked.name, asked.key.read_bytes(), asked.clients)
    print(f"Node {asked.name!r} is admitted from the next start of the server on.")


def _expel(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.deploy.places import ServerPlace

    ServerPlace.load(asked.folder).expel(asked.name)
    print(f"Node {asked.name!r} is expelled from the next start of the server on. Start it with --new.")


def _server(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.deploy.hosting import ServerHost
    from lightning_fed.deploy.places import ServerPlace
    from lightning_fed.deploy.supervisor import Supervisor
    from lightning_fed.store import Lease

    place = ServerPlace.load(asked.folder)
    with Lease(asked.folder), Supervisor(asked.folder / "logs") as supervisor:
        if asked.new:
            place.begin_anew()
        host = ServerHost(place, supervisor)
        host.up()
        while True:
            for entry in host.tick():
                _tell(entry)
                if entry["event"] in ("end", "error"):
                    return _conclude(entry)
            if host.is_over:
                return _conclude(host.entries[-1])
            time.sleep(0.2)


def _client(asked: argparse.Namespace, others: list[str]) -> None:
    from lightning_fed.deploy.hosting import NodeHost
    from lightning_fed.deploy.places import NodePlace
    from lightning_fed.deploy.supervisor import Supervisor
    from lightning_fed.store import Lease

    place = NodePlace.load(asked.folder)
    with Lease(asked.folder), Supervisor(asked.folder / "logs") as supervisor:
        NodeHost(place, supervisor)
        print(f"The node runs; logs: {asked.folder / 'logs'}. Ctrl-C ends it.", flush=True)
        while True:
            for task in supervisor.poll():
                print(f"{task.name} has ended and was started again; its log: {task.log}", flush=True)
                if task.name == "supernode" and task.starts == UNWELCOME:
                    print(_WHY_UNWELCOME, flush=True)
            time.sleep(0.2)


def _ids(text: str) -> list[ClientId]:
    """Ids of clients: whole numbers, or text."""
    words: Sequence[str] = [word for word in text.split(",") if word]
    return [int(word) for word in words] if all(word.lstrip("-").isdigit() for word in words) else list(words)


def _whole(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"must be a whole number >= 1, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"must be a positive number of seconds, got {text!r}")
    return value
