"""LEAF's convolutional network for CelebA."""

from __future__ import annotations

from typing import Literal

from torch import Tensor, nn

from lightning_fed.core.validation import one_of, whole
from lightning_fed.models.classifier import Classifier, glorot


class CelebaCNN(Classifier):
    """Four blocks of a 3x3 convolution of 32 channels, normalisation and pooling, then one linear layer.

    As in LEAF, BatchNorm takes the statistics of the batch, also in evaluation: there are no running ones to average,
    and the score of an image depends on its batch. ``norm="group"`` frees it from that. Weights are Glorot-uniform and
    biases zero, as TensorFlow's defaults make them.

    Args:
        classes: number of classes.
        lr: step size of SGD.
        image_size: of an image in three channels, which is square.
        norm: "batch" (LEAF's), or "group" with two groups.
        log_train: log loss and accuracy of training batches.

    >>> sum(p.numel() for p in CelebaCNN().parameters())
    31202

    Reference: arXiv:1812.01097.
    """

    def __init__(
        self,
        classes: int = 2,
        lr: float = 0.01,
        image_size: int = 84,
        norm: Literal["batch", "group"] = "batch",
        log_train: bool = True,
    ) -> None:
        super().__init__(classes, lr, log_train)
        self.save_hyperparameters()
        self.image_size, self.norm = image_size, norm
        whole(self, "image_size", 16)
        one_of(self, "norm", ("batch", "group"))
        self.features, side = nn.Sequential(), image_size
        for channels in (3, 32, 32, 32):
            self.features.extend([nn.Conv2d(channels, 32, 3, padding=1), self._norm()])
            self.features.extend([nn.MaxPool2d(2, ceil_mode=True), nn.ReLU()])
            side = -(-side // 2)
        self.head = nn.Linear(32 * side * side, classes)
        glorot(self)

    def _norm(self) -> nn.Module:
        return nn.BatchNorm2d(32, eps=1e-3, track_running_stats=False) if self.norm == "batch" else nn.GroupNorm(2, 32)

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for each image."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits
