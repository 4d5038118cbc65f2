"""Run or resume the server of a federation, over any transport."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lightning_fed.cli.deploying.build import build_server, server_of
from lightning_fed.core.layout import Layout
from lightning_fed.deploy.journal import Journal
from lightning_fed.deploy.journalling import Journalling
from lightning_fed.deploy.link import Link, Patience
from lightning_fed.deploy.places import ServerPlace
from lightning_fed.deploy.remote import DeployedServer, RemoteData, call_roll, settings_of
from lightning_fed.deploy.transport import Transport, TransportError
from lightning_fed.lightning import Checkpoint
from lightning_fed.store import read_sealed


def run_server(place: ServerPlace, transport: Transport) -> DeployedServer:
    """Run or resume a federation to its last round, over any transport."""
    with Journal(Path(place.folder).absolute() / "journal") as journal:
        try:
            server = _fit(place, journal, transport)
        except TransportError:
            raise  # whoever looks after this process starts it again
        except Exception as error:  # anything else would come again: it is for the operator
            journal.fail(f"{type(error).__name__}: {error}")
            raise
        journal.end()
    return server


def _fit(place: ServerPlace, journal: Journal, transport: Transport) -> DeployedServer:
    cli = build_server(place.args, place.cwd)
    server, trainer, given = server_of(cli.trainer), cli.trainer, cli.datamodule
    assert isinstance(server, DeployedServer)
    patience = Patience(place.timeout, place.patience)
    names = {node["id"]: name for name, node in place.nodes.items()}

    def tell(round: int, missing: Sequence[int]) -> None:
        journal.wait(round, [names[node] for node in missing])

    server.link = Link(transport, place.owners, journal.run, journal.incarnation, patience, tell)
    clients = [client for node in place.nodes.values() for client in node["clients"]]
    order = {client: i for i, client in enumerate(place.order or clients)}
    clients.sort(key=lambda client: order.get(client, len(order)))
    examples = call_roll(
        server.link, settings_of(server, Layout.of(cli.model, server.personal), server.config), clients
    )
    at = next((i for i, own in enumerate(trainer.callbacks) if isinstance(own, Checkpoint)), len(trainer.callbacks))
    trainer.callbacks.insert(at, Journalling(journal, server))
    data = RemoteData(examples, given.batch_size, given.drop_last)
    if place.weights and journal.last is None:
        cli.model.load_state_dict(read_sealed(Path(place.weights))["state_dict"])
    trainer.fit(cli.model, datamodule=data, ckpt_path=journal.last)
    return server
