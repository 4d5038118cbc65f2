"""The perceptron of the synthetic experiments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.core import one_of, positive

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MLP(pl.LightningModule):
    """Multilayer perceptron for classification: cross entropy, plain SGD, Glorot-uniform weights and zero biases.

    Args:
        sizes: number of features, of units in each hidden layer, and of classes; inputs are flattened.
        lr: step size of SGD.

    >>> sum(p.numel() for p in MLP().parameters())
    2282
    """

    def __init__(
        self,
        sizes: Sequence[int] = (60, 32, 10),
        lr: float = 0.01,
        activation: Literal["relu", "tanh"] = "relu",
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.sizes, self.lr, self.activation = tuple(sizes), lr, activation
        if len(self.sizes) < 2 or any(not isinstance(size, int) or size < 1 for size in self.sizes):
            raise ValueError(f"MLP.sizes must be two or more whole numbers >= 1, got {sizes!r}. Try (60, 32, 10).")
        positive(self, "lr", "It is the step size of SGD; start from 0.01.")
        one_of(self, "activation", tuple(ACTIVATIONS))
        self.layers = nn.Sequential()
        for fan_in, fan_out in pairwise(self.sizes):
            self.layers.extend([_glorot(nn.Linear(fan_in, fan_out)), ACTIVATIONS[activation]()])
        del self.layers[-1]
        self.train_acc, self.val_acc, self.test_acc = (
            MulticlassAccuracy(self.sizes[-1], average="micro") for _ in range(3)
        )

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.layers(x.flatten(1))
        return logits

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train", self.train_acc)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self._step(batch, "val", self.val_acc)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self._step(batch, "test", self.test_acc)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _step(self, batch: Sequence[Tensor], stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        accuracy.update(logits, y)
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=len(y))
        self.log(f"{stage}_acc", accuracy, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=len(y))
        return loss


def _glorot(layer: nn.Linear) -> nn.Linear:
    nn.init.xavier_uniform_(layer.weight)
    nn.init.zeros_(layer.bias)
    return layer
