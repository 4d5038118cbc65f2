"""Modules whose clients cannot be trained side by side, and what each refusal says."""

from __future__ import annotations

import random
from collections import deque
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from helpers.engines.base import Odd, Row
from lightning_fed.algorithms import FedAvg


class NamesTheBatch(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log(f"loss_{batch_idx}", loss)


class ClampsGradients(Odd):
    def configure_optimizers(self) -> Any:
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return super().configure_optimizers()


class ClampsWeights(Odd):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.clamp())
        return optimizer

    @torch.no_grad()
    def clamp(self) -> None:
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)


class DecaysAnIdleHead(Odd):
    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.head = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


class ReadsAMetric(Odd):
    def build(self) -> None:
        self.mean = MeanMetric()

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.mean.update(loss)
        self.log("mean", self.mean.compute())


class KeepsAWindow(Odd):
    def build(self) -> None:
        self.window = deque([1.0], maxlen=2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.window.append(self.window[-1] + 0.1)
        return super().loss(x, y) * self.window[0]


class LooksAtTheIndex(Odd):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if batch_idx % 2 else loss


class LooksAtTheTrainer(Odd):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.current_epoch)


class Draws(Odd):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * (1 + 0.1 * random.random()), batch[1]], batch_idx)


class Counts(Odd):
    count = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


class Branches(Odd):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss.detach()) > 1 else 2 * loss


class AsksTheMetric(Odd):
    def build(self) -> None:
        self.accuracy = MulticlassAccuracy(3, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("now", self.accuracy(self(batch[0]), batch[1]))
        return super().training_step(batch, batch_idx)


class Hooked(Odd):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


class Noisy(Odd):
    """Draws from a generator of its own."""

    def build(self) -> None:
        self.noise: Any = np.random.default_rng(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + torch.as_tensor(self.noise.normal(size=x.shape)), y)


class NoisyTorch(Noisy):
    def build(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return Odd.loss(self, x + torch.randn(x.shape, generator=self.noise, dtype=x.dtype), y)


class CountsLabels(Odd):
    def build(self) -> None:
        self.noise = np.zeros(3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.noise += np.bincount(y.numpy(), minlength=3)
        return super().loss(x, y) * (1 + self.noise[0] / 100)


class AsksForBatches(Odd):
    def build(self) -> None:
        self.accuracy = MulticlassAccuracy(3)

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("batch", self.accuracy(self(x), y))


class SAM(torch.optim.SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ways = [0.05 * p.grad for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, ways)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(params, ways)
        super().step()
        return loss


class UsesSAM(Odd):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lr=0.05)


COUNTED = {"all": "Training changes the attribute count of Counts.* register a buffer"}
WINDOW = {"all": "Training changes the attribute window"}
NOISE = {"all": "Training changes the attribute noise"}
READ = {"workers": "reads the value of mean"}

REFUSED = [
    Row("names the batch", NamesTheBatch, FedAvg(), alone="uses batch_idx"),
    Row("looks at batch_idx", LooksAtTheIndex, alone="uses batch_idx"),
    Row("looks at the trainer", LooksAtTheTrainer, alone="reads the trainer"),
    Row("draws from `random`", Draws, alone="draws random numbers"),
    Row("dropout", lambda: Odd(dropout=0.3), alone=r"Dropout \(net\.3\) draws random numbers"),
    Row("BatchNorm", lambda: Odd(norm=True), alone=r"BatchNorm1d \(net\.1\) changes its running statistics"),
    Row("counts", Counts, alone="changes Counts.count", warns=COUNTED),
    Row("keeps a window", KeepsAWindow, FedAvg(), alone=r"changes KeepsAWindow\.window", warns=WINDOW),
    Row("branches", Branches, alone="turns a tensor into a number, or decides by its value"),
    Row("asks a metric for a batch's value", AsksTheMetric, alone="asks a metric for its value"),
    Row("asks a metric in a log", AsksForBatches, alone="asks a metric for its value"),
    Row("reads a metric", ReadsAMetric, FedAvg(), alone="asks a metric for its value", warns=READ),
    Row("hook on_train_batch_end", Hooked, alone="overrides on_train_batch_end"),
    Row("hook on a gradient", ClampsGradients, FedAvg(), alone=r"hook listens to net\.0\.weight"),
    Row("hook on an optimiser", ClampsWeights, FedAvg(), alone="hook listens to the optimiser"),
    Row("decays an idle head", DecaysAnIdleHead, FedAvg(), alone=r"head\.weight has no gradient"),
    Row("a generator of NumPy", Noisy, alone=r"changes Noisy\.noise", warns=NOISE),
    Row("a generator of torch", NoisyTorch, alone="draws random numbers", warns=NOISE),
    Row("an array that counts", CountsLabels, alone="does not work under torch.func", warns=NOISE),
    Row("SAM", UsesSAM, alone="SAM"),
]
