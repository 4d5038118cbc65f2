"""A federation of nodes in this process, behind a transport that can lose, delay and repeat frames."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.core.layout import Layout
from lightning_fed.deploy.link import Link, Patience
from lightning_fed.deploy.node import Node, NodeServer
from lightning_fed.deploy.remote import DeployedServer, RemoteData, call_roll, settings_of

QUIET: dict[str, Any] = {
    "accelerator": "cpu",
    "logger": False,
    "enable_checkpointing": False,
    "enable_progress_bar": False,
    "enable_model_summary": False,
}


_OPENED: list[Node] = []


def close_nodes() -> None:
    """Close all nodes of a test."""
    while _OPENED:
        _OPENED.pop().close()


class Line(pl.LightningModule):
    """Regression with batch normalisation and a frozen parameter that moves: there is more to average than models."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.layer = torch.nn.BatchNorm1d(3), torch.nn.Linear(3, 1)
        self.seen = torch.nn.Parameter(torch.zeros(1), requires_grad=False)

    def training_step(self, batch: Any) -> Any:
        x, y = batch
        self.seen.data += len(y) * self.layer.bias.detach()
        loss = (self.layer(self.norm(x)).squeeze(1) - y).square().mean()
        self.log("train_error", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


def line() -> Line:
    torch.manual_seed(1)
    return Line()


def data(clients: int = 5) -> FederatedDataModule:
    rng = torch.Generator().manual_seed(0)
    sets: dict[Any, Any] = {}
    for i in range(clients):
        x = torch.randn(8 + 2 * i, 3, generator=rng)
        sets[f"c{i}"] = TensorDataset(x, x @ torch.tensor([1.0, float(i), -1.0]) + i)
    return FederatedDataModule(sets, batch_size=4)


class Wire:
    """Hands frames to nodes of this process; ``before`` and ``after`` may change or drop a frame (None)."""

    def __init__(self, nodes: Mapping[int, Node]) -> None:
        self.nodes_by_id = dict(nodes)
        self.before: Callable[[int, bytes], bytes | None] = lambda node, frame: frame
        self.after: Callable[[int, bytes], bytes | None] = lambda node, frame: frame
        self.sent: list[tuple[int, bytes]] = []
        self.answers: list[tuple[int, bytes]] = []

    def nodes(self) -> set[int]:
        return set(self.nodes_by_id)

    def exchange(self, frames: Mapping[int, bytes], timeout: float) -> Iterator[tuple[int, bytes | None]]:
        for node, frame in frames.items():
            self.sent.append((node, frame))
            given = self.before(node, frame)
            if given is None:
                continue
            answer = self.nodes_by_id[node].follow(given)
            self.answers.append((node, answer))
            yield node, self.after(node, answer)


def node(folder: Path, clients: list[Any], share: tuple[str, ...] = ("loss",), **settings: Any) -> Node:
    server = NodeServer(**settings)
    trainer = pl.Trainer(max_epochs=1, callbacks=[server], limit_val_batches=0, num_sanity_val_steps=0, **QUIET)
    _OPENED.append(Node(trainer, line(), data(), server, clients, folder, share))
    return _OPENED[-1]


def nodes(folder: Path, **settings: Any) -> dict[int, Node]:
    ids = data().client_ids
    return {i: node(folder / f"node{i}", ids[i::2], **settings) for i in range(2)}


def simulated(rounds: int, **settings: Any) -> FederatedServer:
    """The simulation that a real federation must equal."""
    server = FederatedServer(engine="sequential", evaluate_every=0, figure=False, **settings)
    module = line()
    pl.Trainer(max_epochs=rounds, callbacks=[server], **QUIET).fit(module, datamodule=data())
    return server


def link_of(wire: Wire, incarnation: int = 1, patience: Patience | None = None) -> Link:
    owners = {cid: i for i, each in wire.nodes_by_id.items() for cid in each.clients}
    return Link(wire, owners, "run", incarnation, patience or Patience(5, 10, 0.001))


def deployed(
    wire: Wire,
    rounds: int,
    link: Link | None = None,
    callbacks: tuple[Any, ...] = (),
    ckpt: Any = None,
    **settings: Any,
) -> DeployedServer:
    """A server that asks the nodes behind a wire."""
    server = DeployedServer(**settings)
    server.link = link or link_of(wire)
    module = line()
    examples = call_roll(
        server.link, settings_of(server, Layout.of(module, server.personal), server.config), data().client_ids
    )
    trainer = pl.Trainer(max_epochs=rounds, callbacks=[server, *callbacks], **QUIET)
    trainer.fit(module, datamodule=RemoteData(examples, batch_size=4), ckpt_path=ckpt)
    return server


def same(one: FederatedServer, other: FederatedServer) -> bool:
    """Whether two servers have the same bits: model and buffers."""
    assert one.federation is not None
    assert other.federation is not None
    mine, theirs = one.federation, other.federation
    buffers = all(torch.equal(value, theirs.buffers[name]) for name, value in mine.buffers.items())
    return torch.equal(mine.server.x_bar, theirs.server.x_bar) and buffers
