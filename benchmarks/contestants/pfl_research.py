"""pfl-research's FedAvg in its simulated backend."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.callback.base import TrainingProcessCallback
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.data.sampling import get_user_sampler
from pfl.hyperparam.base import NNTrainHyperParams
from pfl.metrics import Metrics
from pfl.model.pytorch import PyTorchModel
from torch import Tensor, nn
from workloads import Workload

from contestants.networks import network


class Classifier(nn.Module):
    """What pfl wants of a model."""

    def __init__(self, model: str) -> None:
        super().__init__()
        self.network = network(model)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self.network(x), y)

    def metrics(self, x: Tensor, y: Tensor) -> dict[str, Any]:
        return {}


class Rounds(TrainingProcessCallback):
    """A turn for every round."""

    def __init__(self, turn: Callable[[], None]) -> None:
        self.turn = turn

    def on_train_begin(self, *, model: PyTorchModel) -> Metrics:
        self.turn()
        return Metrics()

    def after_central_iteration(self, *_: Any, **__: Any) -> tuple[bool, Metrics]:
        self.turn()
        return False, Metrics()


def run(workload: Workload, turn: Callable[[], None], threads: int) -> None:
    torch.set_num_threads(threads)
    data = [(torch.from_numpy(x), torch.from_numpy(y)) for x, y in workload.data()]
    needed = workload.steps * workload.batch

    def samples(user: int) -> PyTorchTensorDataset:
        """One epoch of all the steps, since pfl stops at the end of a client's data."""
        x, y = data[user]
        rows = torch.cat([torch.randperm(len(y)) for _ in range(-(-needed // len(y)))])[:needed]
        return PyTorchTensorDataset([x[rows], y[rows]])

    federation = FederatedDataset(samples, get_user_sampler("random", np.arange(workload.clients)))
    classifier = Classifier(workload.model)
    model = PyTorchModel(classifier, torch.optim.SGD, torch.optim.SGD(classifier.parameters(), lr=1.0))
    FederatedAveraging().run(
        algorithm_params=NNAlgorithmParams(10**6, 10**6, workload.cohort, None),
        backend=SimulatedBackend(training_data=federation, val_data=None),
        model=model,
        model_train_params=NNTrainHyperParams(
            local_num_epochs=1, local_learning_rate=workload.lr, local_batch_size=workload.batch
        ),
        callbacks=[Rounds(turn)],
    )
