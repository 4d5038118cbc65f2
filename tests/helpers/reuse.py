"""Stock training on the very batches a lone client would meet, and a look at what clients hold."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from helpers.drawn import batches
from helpers.modules import quiet_trainer
from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import FederatedCallback

SEED = 5


class Visits(FederatedCallback):
    """What the module held at the end of every visit, and the mean local loss of every round."""

    def __init__(self) -> None:
        self.ends: list[tuple[int, Any, dict[str, Tensor]]] = []
        self.losses: list[float] = []

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        state = {name: t.detach().clone() for name, t in module.state_dict().items()}
        self.ends.append((visit.round, visit.client, state))

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.losses.append(report.local_loss)


class SameBatches:
    """The batches and random numbers that a lone client meets, one round after another, for a plain Trainer."""

    def __init__(self, data: FederatedDataModule, cid: Any, trainer: pl.Trainer) -> None:
        self.data, self.cid, self.trainer = data, cid, trainer

    def __len__(self) -> int:
        return len(self.data.client_dataloader(self.cid))

    def __iter__(self) -> Iterator[Any]:
        return batches(self.data, self.cid, SEED, self.trainer.current_epoch)


def alone(data: FederatedDataModule, cid: Any) -> FederatedDataModule:
    """The federation of this client and nobody else."""
    splits = {split: {cid: data.client_dataset(cid, split)} for split in data.splits}
    return FederatedDataModule(**splits, batch_size=data.batch_size)


def plainly_trained(
    module: pl.LightningModule, data: FederatedDataModule, cid: Any, **kwargs: Any
) -> dict[str, Tensor]:
    """The module's state after stock training on the lone client's batches."""
    trainer = quiet_trainer(None, **kwargs)
    trainer.fit(module, train_dataloaders=SameBatches(data, cid, trainer))
    return module.state_dict()


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    """Bitwise."""
    assert left.keys() == right.keys(), f"other names: {left.keys() ^ right.keys()}"
    unlike = [name for name in left if not torch.equal(left[name], right[name])]
    assert not unlike, f"other values: {unlike}"


class Plain(pl.LightningModule):
    """A classifier as anybody would write it, with some dropout."""

    def __init__(self, norm: bool = False) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(
                nn.Linear(6, 8), nn.BatchNorm1d(8) if norm else nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 3)
            )

    def loss(self, batch: list[Tensor]) -> Tensor:
        return nn.functional.cross_entropy(self.net(batch[0]), batch[1])

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.2)
