"""FedLab's FedAvg: its serial trainer and synchronous server in its standalone pipeline."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import torch
from fedlab.contrib.algorithm.fedavg import FedAvgSerialClientTrainer, FedAvgServerHandler
from fedlab.core.standalone import StandalonePipeline
from torch import Tensor
from workloads import Workload

from contestants.loop import batches
from contestants.networks import network


class Data:
    """What FedLab wants of a dataset."""

    def __init__(self, workload: Workload) -> None:
        self.steps = workload.steps
        self.clients = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.data()]

    def get_dataloader(self, id: int, batch_size: int) -> Iterator[tuple[Tensor, Tensor]]:
        return batches(self.clients[id], batch_size, self.steps)


class Pipeline(StandalonePipeline):
    """Whose evaluation is the driver's turn."""

    def __init__(self, handler: FedAvgServerHandler, trainer: FedAvgSerialClientTrainer, turn: Callable[[], None]):
        super().__init__(handler, trainer)
        self.turn = turn

    def evaluate(self) -> None:
        self.turn()


def run(workload: Workload, turn: Callable[[], None], threads: int) -> None:
    torch.set_num_threads(threads)
    logging.disable(logging.INFO)
    trainer = FedAvgSerialClientTrainer(network(workload.model), workload.clients)
    trainer.setup_dataset(Data(workload))
    trainer.setup_optim(1, workload.batch, workload.lr)
    handler = FedAvgServerHandler(network(workload.model), 10**6, workload.cohort / workload.clients)
    pipeline = Pipeline(handler, trainer, turn)
    turn()
    pipeline.main()
