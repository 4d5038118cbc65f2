"""Base class of classifiers with one label per sample."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.core.validation import is_whole, one_of, positive, shown
from lightning_fed.lightning import pl


class Classifier(pl.LightningModule):
    """Cross entropy, plain SGD, and accuracy on train, val and test; a subclass gives ``forward``.

    A subclass declares ``stackable`` and ``loss_is_mean`` for its ``forward`` (docs/speed.md).

    Args:
        classes: number of classes.
        lr: step size of SGD.
        log_train: log loss and accuracy of training batches; on a small model this takes longer than the step itself.
    """

    def __init__(self, classes: int, lr: float, log_train: bool = True) -> None:
        super().__init__()
        self.lr, self.log_train = lr, log_train
        positive(self, "lr", "It is the step size of SGD; start from 0.01.")
        if not is_whole(classes) or classes < 2:
            raise ValueError(f"{type(self).__name__} needs a whole number >= 2 of classes, got {shown(classes)}.")
        one_of(self, "log_train", (True, False))
        self.train_acc, self.val_acc, self.test_acc = (MulticlassAccuracy(classes, average="micro") for _ in range(3))

    def training_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train", self.train_acc)

    def validation_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self._step(batch, "val", self.val_acc)

    def test_step(self, batch: Sequence[Tensor], batch_idx: int) -> None:
        self._step(batch, "test", self.test_acc)

    def predict_step(self, batch: Sequence[Tensor], batch_idx: int) -> Tensor:
        """The class of each sample."""
        classes: Tensor = self(batch[0]).argmax(1)
        return classes

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)

    def _step(self, batch: Sequence[Tensor], stage: str, accuracy: MulticlassAccuracy) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        if self.training and not self.log_train:
            return loss
        accuracy.update(logits, y)
        self.log(f"{stage}_loss", loss, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=len(y))
        self.log(f"{stage}_acc", accuracy, on_step=False, on_epoch=True, prog_bar=stage == "val", batch_size=len(y))
        return loss


def glorot(module: nn.Module) -> nn.Module:
    """The module, with Glorot-uniform weights and zero biases in all its linear and convolutional layers."""
    for layer in module.modules():
        if isinstance(layer, nn.Linear | nn.Conv2d):
            nn.init.xavier_uniform_(layer.weight)
            if layer.bias is not None:
                nn.init.zeros_(layer.bias)
    return module
