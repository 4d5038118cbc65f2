"""LEAF's convolutional network for FEMNIST."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fed.models.classifier import Classifier, glorot


class FemnistCNN(Classifier):
    """Two 5x5 convolutions with pooling, one hidden layer of 2048, 62 characters; for 28x28 images in one channel.

    Images may come flat, as LEAF stores them. No dropout, no normalisation; weights are Glorot-uniform and biases zero,
    as TensorFlow's defaults make them in LEAF.

    Args:
        lr: step size of SGD.
        classes: number of characters.
        log_train: log loss and accuracy of training batches.

    >>> sum(p.numel() for p in FemnistCNN().parameters())
    6603710
    """

    stackable = loss_is_mean = True

    def __init__(self, lr: float = 0.01, classes: int = 62, log_train: bool = True) -> None:
        super().__init__(classes, lr, log_train)
        self.save_hyperparameters()
        self.features = nn.Sequential(
            nn.Conv2d(1, 32, 5, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(32, 64, 5, padding="same"),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(nn.Linear(64 * 7 * 7, 2048), nn.ReLU(), nn.Linear(2048, classes))
        glorot(self)

    def forward(self, x: Tensor) -> Tensor:
        """One score per character for each image."""
        logits: Tensor = self.head(self.features(x.reshape(-1, 1, 28, 28)).flatten(1))
        return logits
