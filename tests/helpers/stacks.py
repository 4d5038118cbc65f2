"""A module that logs all sorts of things, on clients of uneven size: for comparing ways to train many clients."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from helpers.modules import Net, classification, quiet_trainer
from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm

TOLERANCE = 1e-10


class Smooth(Net):
    """In float64 throughout; logs a loss, a number and a metric."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.log("train_loss", loss, batch_size=len(y))
        self.log_dict({"confidence": logits.detach().softmax(1).amax(1).mean(), "two": 2.0}, batch_size=len(y))
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        return loss


def data(**kwargs: Any) -> FederatedDataModule:
    """Clients of 9, 10, 11, ... samples: batches of 4 leave short ones."""
    plain = classification(5, **kwargs)
    for split in plain.splits.values():
        for cid, dataset in split.items():
            assert isinstance(dataset, TensorDataset)
            x, y = dataset.tensors
            split[cid] = TensorDataset(x.double(), y)
    return plain


def fit(
    engine: Any,
    algorithm: Algorithm,
    module: pl.LightningModule,
    *,
    rounds: int = 3,
    trainer: Any = None,
    **kwargs: Any,
) -> tuple[FederatedServer, pl.Trainer]:
    options = {"local_steps": 7, "seed": 3, "evaluate_every": 0, **kwargs}
    server = FederatedServer(algorithm, engine=engine, **options)
    used = quiet_trainer(server, rounds, **(trainer or {}))
    used.fit(module, datamodule=data())
    return server, used


def memories(server: FederatedServer) -> dict[str, Tensor]:
    """Everything that server and clients remember, by name."""
    federation = server.federation
    assert federation is not None
    states = {"server": federation.server, **{cid: federation.store[cid].state for cid in federation.store}}
    return {f"{who}.{i}": leaf for who, state in states.items() for i, leaf in enumerate(pytree.tree_leaves(state))}
