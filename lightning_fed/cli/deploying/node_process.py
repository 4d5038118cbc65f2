"""``python -m lightning_fed.cli.deploying.node_process FOLDER``: the process with a node's data, module and states."""

from __future__ import annotations

import logging
import sys

from lightning_fed.cli.deploying.build import build_node, server_of
from lightning_fed.deploy.node import Node, NodeServer
from lightning_fed.deploy.places import NodePlace
from lightning_fed.deploy.worker import listening, serve


def node_of(place: NodePlace) -> Node:
    """The node of a folder, with its data loaded."""
    folder = place.folder.absolute()
    cli = build_node(place.args, place.cwd)
    server, data = server_of(cli.trainer), cli.datamodule
    assert isinstance(server, NodeServer)
    data.prepare_data()
    data.setup("fit")
    clients = place.clients or data.client_ids
    return Node(cli.trainer, cli.model, data, server, clients, folder / "states", place.share)


def main(folder: str) -> None:
    """Load the node's data, then answer frames for ever."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    logging.getLogger("pytorch_lightning.utilities.rank_zero").setLevel(logging.WARNING)
    place = NodePlace.load(folder)
    node = node_of(place)
    with listening(place.folder.absolute()) as server:
        serve(server, node.follow)


if __name__ == "__main__":
    main(sys.argv[1])
