"""Your model, unchanged
========================

Train an unchanged Lightning model in a federation of 12 clients with different classes.

The data are drawn here so that the example needs no download; put your own dataset in their place.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.partition import Dirichlet


class Classifier(pl.LightningModule):
    """A usual module: BatchNorm, dropout, Adam, a scheduler, torchmetrics."""

    def __init__(self, features: int = 20, classes: int = 4) -> None:
        super().__init__()
        self.net = nn.Sequential(
            nn.Linear(features, 64), nn.BatchNorm1d(64), nn.ReLU(), nn.Dropout(0.2), nn.Linear(64, classes)
        )
        self.accuracy = MulticlassAccuracy(classes, average="micro")

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self.net(batch[0])
        self.accuracy(logits, batch[1])
        self.log("val_acc", self.accuracy, prog_bar=True)
        return nn.functional.cross_entropy(logits, batch[1])

    def configure_optimizers(self) -> dict[str, object]:
        optimizer = torch.optim.Adam(self.parameters(), lr=1e-3)
        return {"optimizer": optimizer, "lr_scheduler": torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 30)}


def blobs(n: int = 3000, features: int = 20, classes: int = 4) -> TensorDataset:
    g = torch.Generator().manual_seed(0)
    y = torch.randint(classes, (n,), generator=g)
    centres = torch.randn(classes, features, generator=g)
    return TensorDataset(centres[y] + 1.5 * torch.randn(n, features, generator=g), y)


def main() -> None:
    pl.seed_everything(0, verbose=False)
    data = FederatedDataModule.from_dataset(
        blobs(), Dirichlet(clients=12, alpha=0.3, min_examples=20), test_fraction=0.2, batch_size=16, drop_last=True
    )
    server = FederatedServer(FedADMM(eta=1.0), clients_per_round=6, local_epochs=1)
    trainer = pl.Trainer(
        max_epochs=30,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[server],
    )
    trainer.fit(Classifier(), datamodule=data)
    print(f"accuracy on held-out samples of all clients: {float(trainer.callback_metrics['val_acc']):.3f}")
    axes = plt.figure(figsize=(6, 3.2), layout="constrained").subplots()
    axes.plot([row["round"] + 1 for row in server.history], [row["val_acc"] for row in server.history])
    axes.set(xlabel="round", ylabel="accuracy on held-out samples", title="BatchNorm, dropout and Adam under FedADMM")
    path = Path("runs/your_model.png")
    path.parent.mkdir(exist_ok=True)
    plt.savefig(path, dpi=110)
    print(f"Figure: {path}")


if __name__ == "__main__":
    main()
