"""Sequences of different lengths
=================================

Train a GRU on ragged sequences with a collate_fn: 8 clients, rising and falling waves.

The data are drawn here so that the example needs no download; put your own sequences in their place.
"""

from __future__ import annotations

from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_sequence

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM

Sample = tuple[Tensor, Tensor]


class Listener(pl.LightningModule):
    """A GRU over packed sequences, as for a plain Trainer."""

    def __init__(self, features: int = 1, hidden: int = 16, classes: int = 2) -> None:
        super().__init__()
        self.gru = nn.GRU(features, hidden)
        self.head = nn.Linear(hidden, classes)

    def forward(self, sequences: PackedSequence) -> Tensor:
        _, last = self.gru(sequences)
        scores: Tensor = self.head(last[-1])
        return scores

    def training_step(self, batch: tuple[PackedSequence, Tensor], batch_idx: int) -> Tensor:
        sequences, labels = batch
        return nn.functional.cross_entropy(self(sequences), labels)

    def validation_step(self, batch: tuple[PackedSequence, Tensor], batch_idx: int) -> Tensor:
        sequences, labels = batch
        scores = self(sequences)
        self.log("val_acc", (scores.argmax(1) == labels).float().mean())
        return nn.functional.cross_entropy(scores, labels)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters(), lr=1e-2)


def together(samples: list[Sample]) -> tuple[PackedSequence, Tensor]:
    """The collate_fn: a batch holds sequences one after another, without padding."""
    sequences, labels = zip(*samples, strict=True)
    return pack_sequence(list(sequences), enforce_sorted=False), torch.stack(labels)


def waves(client: int, samples: int) -> list[Sample]:
    """Noisy waves of 5 to 30 points around a line that rises (1) or falls (0); every client has its own frequency."""
    g = torch.Generator().manual_seed(client)
    drawn = []
    for label in torch.randint(2, (samples,), generator=g):
        length = int(torch.randint(5, 31, (1,), generator=g))
        t = torch.linspace(0, 1, length)
        wave = 0.6 * torch.sin((3 + client) * t) + 0.8 * torch.randn(length, generator=g)
        drawn.append(((wave + (2 * label - 1) * t).unsqueeze(1), label))
    return drawn


def main() -> None:
    pl.seed_everything(0, verbose=False)
    train = {f"microphone {i}": waves(i, 30 + 5 * i) for i in range(8)}
    test = {f"microphone {i}": waves(100 + i, 20) for i in range(8)}
    data = FederatedDataModule(train, test=test, batch_size=16, loader_options={"collate_fn": together})
    server = FederatedServer(FedADMM(eta=1.0), clients_per_round=4, local_steps=5)
    trainer = pl.Trainer(
        max_epochs=8,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        callbacks=[server],
    )
    trainer.fit(Listener(), datamodule=data)
    print(f"accuracy on held-out sequences of all clients: {float(trainer.callback_metrics['val_acc']):.3f}")
    left, right = plt.figure(figsize=(8, 3.2), layout="constrained").subplots(1, 2)
    for sequence, label in train["microphone 0"][:12]:
        left.plot(sequence.squeeze(1), f"C{int(label)}", linewidth=1)
    left.set(xlabel="time", ylabel="signal", title="Sequences of one client: falling, rising")
    right.plot([row["round"] + 1 for row in server.history], [row["val_acc"] for row in server.history], "o-")
    right.set(xlabel="round", ylabel="accuracy on held-out sequences", title="FedADMM, 4 of 8 clients per round")
    path = Path("runs/sequences.png")
    path.parent.mkdir(exist_ok=True)
    plt.savefig(path, dpi=110)
    print(f"Figure: {path}")


if __name__ == "__main__":
    main()
