"""A module whose parameters have every shape that a pattern may meet."""

import pytest
import torch
from torch import nn

from lightning_fed.core.layout import Layout


class Net(nn.Module):
    """Convolution, normalisation, linear layer: every shape a pattern may meet."""

    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(2, 3, 2)
        self.norm = nn.BatchNorm2d(3)
        self.head = nn.Linear(3, 4)


@pytest.fixture
def net():
    return Net().double()


@pytest.fixture
def layout(net):
    return Layout.of(net)


@pytest.fixture
def x(layout):
    return torch.randn(layout.numel, dtype=torch.float64)
