"""Modules of installed packages, as they are, or in a wrapper of a few lines."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.demos import lstm, transformer
from pytorch_lightning.demos.boring_classes import BoringModel, DemoModel, ManualOptimBoringModel
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset
from torchvision.models import DenseNet, ShuffleNetV2, VisionTransformer, mobilenet_v3_small

from helpers.zoo.base import Entry, federation, seeded
from lightning_fed import FederatedDataModule


class Bare(Dataset[Tensor]):
    """Samples that are a tensor and nothing else."""

    def __init__(self, rows: Tensor) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Tensor:
        return self.rows[i]


def bare() -> FederatedDataModule:
    return federation(lambda n, g: Bare(torch.randn(n, 32, generator=g, dtype=torch.float64)))


def sentences() -> FederatedDataModule:
    def make(n: int, g: torch.Generator) -> TensorDataset:
        words = torch.randint(0, 7, (n, 6), generator=g)
        return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())

    return federation(make)


def images() -> FederatedDataModule:
    def make(n: int, g: torch.Generator) -> TensorDataset:
        pixels = torch.randn(n, 3, 8, 8, generator=g, dtype=torch.float64)
        return TensorDataset(pixels, torch.randint(0, 3, (n,), generator=g))

    return federation(make, batch_size=5)  # BatchNorm of fewer values magnifies rounding


class LightningTransformer(transformer.LightningTransformer):
    """Lightning's demo with fewer numbers and without its download."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model = transformer.Transformer(7, ninp=4, nhead=2, nhid=4, nlayers=1)

    def prepare_data(self) -> None:
        pass


class LightningLSTM(lstm.LightningLSTM):
    """Lightning's demo with fewer numbers, without its download, and with a rate that float64 can bear."""

    def __init__(self) -> None:
        pl.LightningModule.__init__(self)
        self.model, self.hidden = lstm.SimpleLSTM(7, ninp=3, nhid=3, nlayers=2), None

    def prepare_data(self) -> None:
        pass

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Vision(pl.LightningModule):
    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.model(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.001)


def vision(make: Any) -> Any:
    return seeded(lambda: Vision(make()))


PUBLIC = [
    Entry("Lightning's `BoringModel`", seeded(BoringModel), "its scheduler steps once a round", data=bare),
    Entry("Lightning's `ManualOptimBoringModel`", seeded(ManualOptimBoringModel), data=bare),
    Entry("Lightning's `DemoModel`", seeded(DemoModel), "Adam, whose memory starts empty in every visit", data=bare),
    Entry(
        "Lightning's `LightningTransformer`",
        seeded(LightningTransformer),
        "it computes its masks anew in every visit",
        data=sentences,
        dropped="src_mask of Transformer",
        also_dropped=("pe of PositionalEncoding",),
    ),
    Entry(
        "Lightning's `LightningLSTM`",
        seeded(LightningLSTM),
        "as it does itself at the end of an epoch, every visit begins without a hidden state",
        data=sentences,
        dropped="hidden of LightningLSTM",
    ),
    Entry(
        "torchvision's `mobilenet_v3_small`",
        vision(lambda: mobilenet_v3_small(num_classes=3, width_mult=0.1)),
        "BatchNorm follows `buffers`",
        data=images,
    ),
    Entry(
        "torchvision's `ShuffleNetV2`",
        vision(lambda: ShuffleNetV2([1, 1, 1], [4, 4, 8, 8, 8], num_classes=3)),
        "BatchNorm follows `buffers`",
        data=images,
    ),
    Entry(
        "torchvision's `DenseNet`",
        vision(lambda: DenseNet(2, (1, 1), 4, num_classes=3)),
        "BatchNorm follows `buffers`",
        data=images,
    ),
    Entry(
        "torchvision's `VisionTransformer`",
        vision(lambda: VisionTransformer(8, 4, 1, 2, 4, 8, dropout=0.1, num_classes=3)),
        data=images,
    ),
]
