"""Flower's FedAvg in its simulation, with a core for every client."""

from __future__ import annotations

import os

os.environ |= {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0", "RAY_DISABLE_IMPORT_WARNING": "1"}

from collections.abc import Callable, Iterable
from functools import cache
from typing import Any

import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid, ServerApp
from flwr.serverapp.strategy import FedAvg
from flwr.simulation import run_simulation
from torch import Tensor, nn
from workloads import Workload

from contestants.loop import batches
from contestants.networks import network


@cache
def federation(workload: Workload) -> list[tuple[Tensor, Tensor]]:
    """Read once in every process."""
    torch.set_num_threads(1)
    return [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.data()]


@cache
def model_and_optimizer(workload: Workload) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = network(workload.model)
    return model, torch.optim.SGD(model.parameters(), lr=workload.lr)


def local_work(message: Message, client: int, workload: Workload) -> Message:
    data = federation(workload)[client]
    model, optimizer = model_and_optimizer(workload)
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    for x, y in batches(data, workload.batch, workload.steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    facts = MetricRecord({"num-examples": len(data[1])})
    return Message(RecordDict({"arrays": ArrayRecord(model.state_dict()), "metrics": facts}), reply_to=message)


class Rounds(FedAvg):
    """A turn for every round."""

    def __init__(self, turn: Callable[[], None], **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.turn = turn

    def configure_train(self, *args: Any, **kwargs: Any) -> Iterable[Message]:
        self.turn()
        return super().configure_train(*args, **kwargs)


def run(workload: Workload, turn: Callable[[], None]) -> None:
    torch.set_num_threads(1)
    client_app, server_app = ClientApp(), ServerApp()

    @client_app.train()
    def train(message: Message, context: Context) -> Message:
        return local_work(message, int(context.node_config["partition-id"]), workload)

    @server_app.main()
    def main(grid: Grid, context: Context) -> None:
        share = workload.cohort / workload.clients
        strategy = Rounds(turn, fraction_train=share, fraction_evaluate=0.0, min_available_nodes=workload.clients)
        strategy.start(grid, ArrayRecord(network(workload.model).state_dict()), num_rounds=10**6)

    cores = {"client_resources": {"num_cpus": 1, "num_gpus": 0.0}}
    run_simulation(server_app, client_app, num_supernodes=workload.clients, backend_config=cores)
