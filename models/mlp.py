"""The perceptron of the synthetic experiments."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

from torch import Tensor, nn

from lightning_fed.core.validation import one_of
from lightning_fed.models.classifier import Classifier, glorot

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}


class MLP(Classifier):
    """Multilayer perceptron for classification: cross entropy, plain SGD, Glorot-uniform weights and zero biases.

    Args:
        sizes: number of features, of units in each hidden layer, and of classes; inputs are flattened.
        lr: step size of SGD.
        activation: between the layers.
        log_train: log loss and accuracy of training batches; this takes longer than the step itself.

    >>> sum(p.numel() for p in MLP().parameters())
    2282
    """

    stackable = loss_is_mean = True

    def __init__(
        self,
        sizes: Sequence[int] = (60, 32, 10),
        lr: float = 0.01,
        activation: Literal["relu", "tanh"] = "relu",
        log_train: bool = True,
    ) -> None:
        is_list = isinstance(sizes, Sequence) and len(sizes) >= 2
        if not is_list or any(not isinstance(size, int) or size < 1 for size in sizes):
            raise ValueError(f"MLP.sizes must be two or more whole numbers >= 1, got {sizes!r}. Try (60, 32, 10).")
        super().__init__(sizes[-1], lr, log_train)
        self.save_hyperparameters()
        self.sizes, self.activation = tuple(sizes), activation
        one_of(self, "activation", tuple(ACTIVATIONS))
        self.layers = nn.Sequential()
        for fan_in, fan_out in pairwise(self.sizes):
            self.layers.extend([glorot(nn.Linear(fan_in, fan_out)), ACTIVATIONS[activation]()])
        del self.layers[-1]

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for each sample."""
        logits: Tensor = self.layers(x.flatten(1))
        return logits
