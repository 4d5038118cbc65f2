"""Multinomial logistic regression."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fed.core.validation import whole
from lightning_fed.models.classifier import Classifier, glorot


class LogisticRegression(Classifier):
    """One linear layer: the convex model, LEAF's for its synthetic data; inputs are flattened.

    Args:
        features: number of entries of an input.
        classes: number of classes.
        lr: step size of SGD.
        log_train: log loss and accuracy of training batches; this takes longer than the step itself.

    >>> sum(p.numel() for p in LogisticRegression().parameters())
    610
    """

    stackable = loss_is_mean = True

    def __init__(self, features: int = 60, classes: int = 10, lr: float = 0.01, log_train: bool = True) -> None:
        super().__init__(classes, lr, log_train)
        self.save_hyperparameters()
        self.features = features
        whole(self, "features", 1)
        self.layer = glorot(nn.Linear(features, classes))

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for each sample."""
        logits: Tensor = self.layer(x.flatten(1))
        return logits
