"""The models in plain torch, for everybody who wants no LightningModule."""

from __future__ import annotations

from torch import nn


def network(model: str) -> nn.Module:
    if model == "mlp":
        return nn.Sequential(nn.Linear(60, 32), nn.ReLU(), nn.Linear(32, 10))
    return nn.Sequential(
        nn.Conv2d(1, 32, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 64, 5, padding="same"),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Flatten(),
        nn.Linear(64 * 7 * 7, 2048),
        nn.ReLU(),
        nn.Linear(2048, 62),
    )
