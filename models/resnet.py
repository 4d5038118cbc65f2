"""torchvision's ResNet-18 with group normalisation."""

from __future__ import annotations

from functools import partial
from typing import Literal

from torch import Tensor, nn

from lightning_fed.core.validation import one_of, whole
from lightning_fed.models.classifier import Classifier


class ResNet18GN(Classifier):
    """torchvision's ResNet-18 with GroupNorm in the place of BatchNorm: nothing depends on a client's batches.

    Averages of BatchNorm's statistics describe no client whose data differ from the others'; GroupNorm has none
    (arXiv:1910.00189). Two groups are usual in federations (arXiv:2003.00295).

    Args:
        classes: number of classes.
        lr: step size of SGD.
        groups: number of groups of channels that are normalised together; divides 64.
        stem: "cifar" begins with a 3x3 convolution at full resolution, for images of about 32x32; "imagenet" is
            torchvision's own, a 7x7 convolution and pooling, which divide the resolution by 4.
        channels: of an image.
        log_train: log loss and accuracy of training batches.

    >>> sum(p.numel() for p in ResNet18GN(classes=10).parameters())
    11173962
    """

    stackable = loss_is_mean = True

    def __init__(
        self,
        classes: int = 10,
        lr: float = 0.05,
        groups: int = 2,
        stem: Literal["cifar", "imagenet"] = "cifar",
        channels: int = 3,
        log_train: bool = True,
    ) -> None:
        from torchvision.models.resnet import BasicBlock, ResNet

        super().__init__(classes, lr, log_train)
        self.save_hyperparameters()
        self.groups, self.stem, self.channels = groups, stem, channels
        one_of(self, "stem", ("cifar", "imagenet"))
        whole(self, "channels", 1)
        whole(self, "groups", 1)
        if 64 % groups:
            raise ValueError(f"ResNet18GN.groups must divide 64, the smallest number of channels, got {groups}.")
        self.network = ResNet(BasicBlock, [2, 2, 2, 2], classes, norm_layer=partial(nn.GroupNorm, groups))
        if stem == "cifar":
            self.network.conv1 = _convolution(channels, size=3, stride=1)
            self.network.maxpool = nn.Identity()
        elif channels != 3:
            self.network.conv1 = _convolution(channels, size=7, stride=2)

    def forward(self, x: Tensor) -> Tensor:
        """One score per class for each image."""
        logits: Tensor = self.network(x)
        return logits


def _convolution(channels: int, size: int, stride: int) -> nn.Conv2d:
    """The first layer, with the weights that torchvision's ResNet begins with."""
    layer = nn.Conv2d(channels, 64, size, stride=stride, padding=size // 2, bias=False)
    nn.init.kaiming_normal_(layer.weight, mode="fan_out", nonlinearity="relu")
    return layer
