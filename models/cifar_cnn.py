"""The usual small convolutional network for CIFAR."""

from __future__ import annotations

from torch import Tensor, nn

from lightning_fed.core.validation import whole
from lightning_fed.models.classifier import Classifier


class CifarCNN(Classifier):
    """Two 5x5 convolutions of 64 channels with pooling, hidden layers of 384 and 192.

    The network of the FedAvg paper for CIFAR-10 (arXiv:1602.05629, after TensorFlow's tutorial) as later papers use it:
    on whole images of 32x32, without padding and without local response normalisation. Weights begin as torch's layers
    make them.

    Args:
        classes: number of classes.
        lr: step size of SGD.
        channels, image_size: of an image, which is square; at least 16 pixels wide.
        log_train: log loss and accuracy of training batches.

    >>> sum(p.numel() for p in CifarCNN().parameters())
    797962
    """

    stackable = loss_is_mean = True

    def __init__(
        self, classes: int = 10, lr: float = 0.1, channels: int = 3, image_size: int = 32, log_train: bool = True
    ) -> None:
        super().__init__(classes, lr, log_train)
        self.save_hyperparameters()
        self.channels, self.image_size = channels, image_size
        whole(self, "channels", 1)
        whole(self, "image_size", 16)
        side = ((image_size - 4) // 2 - 4) // 2
        self.features = nn.Sequential(
            nn.Conv2d(channels, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Conv2d(64, 64, 5),
            nn.ReLU(),
            nn.MaxPool2d(2),
        )
        self.head = nn.Sequential(
            nn.Linear(64 * side * side, 384), nn.ReLU(), nn.Linear(384, 192), nn.ReLU(), nn.Linear(192, classes)
        )

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for each image."""
        logits: Tensor = self.head(self.features(x).flatten(1))
        return logits
