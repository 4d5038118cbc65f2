"""LEAF's CNN, layer by layer, and under both kinds of fit."""

from __future__ import annotations

import pytest
import torch
from helpers.modules import quiet_trainer, x_of
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.models import FemnistCNN


def characters(clients: int = 2, n: int = 6) -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    make = lambda: TensorDataset(torch.rand(n, 784, generator=g), torch.randint(62, (n,), generator=g))  # noqa: E731
    return FederatedDataModule([make() for _ in range(clients)], test=[make() for _ in range(clients)], batch_size=2)


def test_leafs_cnn_has_6603710_parameters() -> None:
    counts = [sum(p.numel() for p in layer.parameters()) for layer in (*FemnistCNN().features, *FemnistCNN().head)]
    assert [count for count in counts if count] == [832, 51_264, 6_424_576, 127_038]
    assert sum(counts) == 6_603_710


@pytest.mark.parametrize("shape", [(784,), (28, 28), (1, 28, 28)])
def test_images_may_be_flat_or_square(shape: tuple[int, ...]) -> None:
    assert FemnistCNN()(torch.zeros(3, *shape)).shape == (3, 62)


@pytest.mark.parametrize("server", [None, FederatedServer(FedADMM(), local_steps=1, evaluate_every=0)])
def test_it_trains_centrally_and_federatedly(server: FederatedServer | None) -> None:
    module = FemnistCNN()
    before = x_of(module).clone()
    trainer = quiet_trainer(server, 1, limit_train_batches=1)
    trainer.fit(module, datamodule=characters())
    assert not torch.equal(x_of(module), before)
    assert {"train_loss", "train_acc", "val_loss", "val_acc"} <= trainer.callback_metrics.keys()
