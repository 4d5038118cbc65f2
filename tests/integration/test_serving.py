"""A server from its folder, over a wire in this process: it resumes, begins anew, and says why it cannot go on."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federation import Wire

from lightning_fed.cli.deploying.build import build_node, server_of
from lightning_fed.cli.deploying.serving import run_server
from lightning_fed.deploy import pki
from lightning_fed.deploy.journal import LINES, Lines
from lightning_fed.deploy.link import RefusedError
from lightning_fed.deploy.node import Node, NodeServer
from lightning_fed.deploy.places import ServerPlace
from lightning_fed.deploy.transport import TransportError

CONFIG = """
seed_everything: 0
trainer: {max_epochs: 3, accelerator: cpu, logger: false, enable_model_summary: false, enable_progress_bar: false}
model: {class_path: lightning_fed.models.MLP, init_args: {sizes: [60, 8, 10], lr: 0.05}}
data: {class_path: lightning_fed.datamodules.Synthetic, init_args: {clients: 4, batch_size: 2}}
federated:
  algorithm: {class_path: lightning_fed.algorithms.FedADMM}
  clients_per_round: 3
  local_steps: 3
"""
CLIENTS = [f"f_{i:05d}" for i in range(4)]


@pytest.fixture
def server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ServerPlace:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as LightningCLI itself
    monkeypatch.setattr("sys.argv", ["pytest"])
    monkeypatch.chdir(tmp_path)
    Path("config.yaml").write_text(CONFIG)
    place = ServerPlace(tmp_path / "server", ["--config", "config.yaml"])
    place.folder.mkdir()
    for i, name in enumerate(("a", "b")):
        place.admit(name, pki.make_node_key(tmp_path / name).with_suffix(".pub").read_bytes(), CLIENTS[i::2])
        place.nodes[name]["id"] = i
    place.order, place.timeout, place.patience = CLIENTS, 5.0, 5.0
    return place


@pytest.fixture
def wire(server: ServerPlace, tmp_path: Path) -> Any:
    found = Wire({i: node(server.args, tmp_path / f"node-{name}", CLIENTS[i::2]) for i, name in enumerate(("a", "b"))})
    yield found
    for each in found.nodes_by_id.values():
        each.close()


def node(args: list[str], folder: Path, clients: list[Any]) -> Node:
    cli = build_node(args)
    own = server_of(cli.trainer)
    assert isinstance(own, NodeServer)
    cli.datamodule.setup("fit")
    return Node(cli.trainer, cli.model, cli.datamodule, own, clients, folder)


def entries(server: ServerPlace) -> list[dict[str, Any]]:
    return Lines(server.folder / "journal" / LINES).read()


def test_a_server_whose_transport_goes_away_resumes_from_its_journal(server: ServerPlace, wire: Wire) -> None:
    def gone(whose: int, answer: bytes) -> bytes:
        if len([entry for entry in entries(server) if entry["event"] == "round"]) == 1:
            raise TransportError("the SuperLink was killed")
        return answer

    wire.after = gone
    with pytest.raises(TransportError):
        run_server(server, wire)
    assert [entry["event"] for entry in entries(server)] == ["start", "round"]  # no error: it is started again
    wire.after = lambda whose, answer: answer
    run_server(server, wire)
    found = entries(server)
    assert [entry["event"] for entry in found] == ["start", "round", "start", "round", "round", "end"]
    assert [entry["round"] for entry in found if entry["event"] == "round"] == [0, 1, 2]
    assert len({entry["run"] for entry in found if entry["event"] == "start"}) == 1


def test_a_new_run_begins_with_the_last_model_and_with_clients_that_remember_nothing(
    server: ServerPlace, wire: Wire
) -> None:
    first = run_server(server, wire).federation
    assert first is not None
    server.begin_anew()
    server.expel("b")
    server.args.append("--federated.clients_per_round=2")
    second = run_server(server, wire).federation
    assert second is not None
    assert torch.equal(second.x0, first.server.x_bar)
    assert second.client_ids == CLIENTS[::2]
    assert all(own is not None and own.visits == 3 for own in map(second.store.get, second.client_ids))


def test_what_would_come_again_is_written_for_the_operator(server: ServerPlace, wire: Wire) -> None:
    server.args.append("--federated.local_steps=4")
    with pytest.raises(RefusedError):
        run_server(server, wire)
    assert "local_steps is 3 on this node, and 4 on the server" in entries(server)[-1]["reason"]
