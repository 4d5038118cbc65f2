"""Modules for tests of evaluation, written without knowing about us, and readers of what was logged."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric, Metric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from helpers.modules import Net
from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM

ACCURACY = "federated/test_accuracy"


def server(algorithm: Algorithm | None = None, **kwargs: Any) -> FederatedServer:
    settings = {"clients_per_round": 2, "local_steps": 3, "figure": False, **kwargs}
    return FederatedServer(algorithm or FedADMM(eta=1.0), **settings)


def metrics_of(trainer: pl.Trainer) -> dict[str, float]:
    return {name: float(value) for name, value in trainer.callback_metrics.items()}


def rows_of(path: Path) -> list[dict[str, str]]:
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def table_of(folder: Path) -> list[dict[str, str]]:
    return rows_of(folder / "csv" / "version_0" / "clients_table.csv")


def blank(cell: str) -> bool:
    return cell in ("", "nan")


class Median(Metric):
    """A metric that keeps everything it saw in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("values", [], dist_reduce_fx="cat")

    def update(self, values: Tensor) -> None:
        self.values.append(values)

    def compute(self) -> Tensor:
        return torch.cat(self.values).median()


class Metrics(Net):
    """Logs torchmetrics objects, with tensor states and with list states."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy, self.median, self.mean_loss = MulticlassAccuracy(3), Median(), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy.update(logits.detach(), y)
        self.median.update(logits.detach()[:, 0])
        self.mean_loss.update(loss.detach(), len(y))
        for name in ("accuracy", "median", "mean_loss"):
            self.log(name, getattr(self, name), on_step=False, on_epoch=True)
        return loss


class Collection(Net):
    """A MetricCollection, whose members share states in compute groups."""

    def __init__(self) -> None:
        super().__init__()
        parts: dict[str, Metric] = {"prec": MulticlassPrecision(3), "f1": MulticlassF1Score(3)}
        self.collection = MetricCollection({**parts, "acc": MulticlassAccuracy(3)}, prefix="train_")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.collection.update(logits.detach(), y)
        self.log_dict(self.collection, on_step=False, on_epoch=True)
        return nn.functional.cross_entropy(logits, y)


class SharedMetric(Net):
    """Uses one metric object in training and in validation, and logs its value at the end of epochs by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        self.accuracy.update(logits.detach(), y)
        return nn.functional.cross_entropy(logits, y)

    def on_train_epoch_end(self) -> None:
        self.log("by_hand", self.accuracy.compute())
        self.accuracy.reset()

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        pass


class Outputs(Net):
    """Lightning's own advice since 2.0: collect outputs in a list, reduce and clear it when the epoch ends."""

    def __init__(self) -> None:
        super().__init__()
        self.outputs: list[Tensor] = []

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        x, y = batch
        self.outputs.append(nn.functional.cross_entropy(self(x), y, reduction="none"))

    def on_validation_epoch_end(self) -> None:
        collected = torch.cat(self.outputs)
        self.log("val_examples", float(len(collected)))
        self.log("val_loss", collected.mean())
        self.outputs.clear()


class Counting(Net):
    """Counts samples in a buffer, whatever mode it is in."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros(()))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.seen += len(batch[1])
        return super().training_step(batch, batch_idx)


class Noisy(Net):
    """Draws random numbers in every step."""

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x + 0.1 * torch.randn_like(x))


class HalfFrozen(Net):
    """Keeps a part in evaluation mode while it trains."""

    def on_train_epoch_start(self) -> None:
        self.net[1].eval()
        self.net[3].eval()


class Bare(pl.LightningModule):
    """No validation_step, no logging."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Linear(6, 3)

    def training_step(self, batch: list[Tensor]) -> dict[str, Tensor]:
        x, y = batch
        return {"loss": nn.functional.cross_entropy(self.net(x), y)}

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Manual(Bare):
    """Manual optimisation; nothing is returned, nothing validates."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor]) -> None:  # type: ignore[override]
        x, y = batch
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(nn.functional.cross_entropy(self.net(x), y))
        optimizer.step()


class ManualValidated(Manual):
    def validation_step(self, batch: list[Tensor]) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y)
