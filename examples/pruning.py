"""Pruning by a group lasso
===========================

Train with FedADMM and a group lasso as ``g``, which makes filters zero, and remove these filters.

A small network on generated handwriting: 20 writers, 10 of them per round, a minute or two. The prox of the server
makes whole filters exactly zero; without them, a smaller network gives the same outputs.
"""

# sphinx_gallery_thumbnail_path = "pruning.png"

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path

import pytorch_lightning as pl
import torch
from matplotlib.figure import Figure
from torch import Tensor, nn

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FinalFigure, Sparsity
from lightning_fed.core import num_bytes
from lightning_fed.datamodules import FEMNIST
from lightning_fed.prox import GroupLasso
from lightning_fed.tracking import AutoWandbLogger, log_figure

CONVOLUTIONS = "conv*.weight"


class SmallCNN(pl.LightningModule):
    """Two convolutions without padding, each with pooling, and a linear layer; without code for pruning."""

    def __init__(self, filters: tuple[int, int] = (16, 32), lr: float = 0.05) -> None:
        super().__init__()
        self.lr = lr
        self.conv1 = nn.Conv2d(1, filters[0], 5)
        self.conv2 = nn.Conv2d(filters[0], filters[1], 5)
        self.head = nn.Linear(filters[1] * 4 * 4, 62)

    def forward(self, x: Tensor) -> Tensor:
        x = x.reshape(-1, 1, 28, 28)
        for layer in (self.conv1, self.conv2):
            x = nn.functional.max_pool2d(nn.functional.relu(layer(x)), 2)
        return self.head(x.flatten(1))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        logits = self(batch[0])
        if not self.training:
            self.log("accuracy", (logits.argmax(1) == batch[1]).float().mean())
        return nn.functional.cross_entropy(logits, batch[1])

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self.training_step(batch, batch_idx)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


@torch.no_grad()
def without_zero_filters(net: SmallCNN) -> SmallCNN:
    """The same function with fewer filters.

    A zero filter gives relu(its bias) everywhere, so it adds a constant to the next layer, which goes into the
    biases there. This is exact because there is no padding, which would cut the constant off at the borders.
    """
    layers = {name: (layer.weight.clone(), layer.bias.clone()) for name, layer in net.named_children()}
    for name, following in pairwise(layers):
        (weight, bias), (next_weight, next_bias) = layers[name], layers[following]
        kept = weight.flatten(1).any(1)
        if not kept.any():
            raise ValueError(f"All {len(kept)} filters of {name} are zero: nothing would be left. Lower --strength.")
        inputs = next_weight.unflatten(1, (len(kept), -1)) if next_weight.ndim == 2 else next_weight
        next_bias = next_bias + inputs.flatten(2).sum(2) @ (bias.relu() * ~kept)
        inputs = inputs[:, kept]
        layers[name] = weight[kept], bias[kept]
        layers[following] = inputs.flatten(1) if next_weight.ndim == 2 else inputs, next_bias
    pruned = SmallCNN((len(layers["conv1"][1]), len(layers["conv2"][1])), net.lr).to(net.head.weight.dtype)
    for name, layer in pruned.named_children():
        layer.weight.copy_(layers[name][0])
        layer.bias.copy_(layers[name][1])
    return pruned


@torch.no_grad()
def logits_of(net: SmallCNN, data: FederatedDataModule) -> tuple[Tensor, Tensor]:
    """The network's outputs for all writers' test characters, in its own precision, and the labels."""
    batches = [(net(x.to(net.head.weight.dtype)), y) for x, y in data.test_dataloader()]
    return torch.cat([scores for scores, _ in batches]), torch.cat([y for _, y in batches])


def draw(history: list[dict[str, float]]) -> Figure:
    """Zero filters and accuracy by round."""
    figure = Figure(figsize=(10, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    rounds = [row["round"] + 1 for row in history]
    for layer in ("conv1", "conv2"):
        left.plot(rounds, [row[f"sparsity/{layer}.weight/filters"] for row in history], label=f"{layer}: zero filters")
    left.set(xlabel="round", title="Filters that are exactly zero")
    for split in ("train", "test"):
        right.plot(rounds, [row[f"federated/{split}_accuracy"] for row in history], label=f"{split} accuracy")
    right.set(xlabel="round", title="Accuracy")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.legend()
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--strength", type=float, help="strength of the group lasso (default: 0.004)")
    parser.add_argument("--quick", action="store_true", help="try it: 4 writers, 3 rounds")
    parser.add_argument("--out", type=Path, default=Path("runs/pruning"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    pl.seed_everything(0, verbose=False)
    data = FEMNIST(writers=4 if args.quick else 20, batch_size=20, pixels={"invert": True})
    strength = args.strength or (0.01 if args.quick else 0.004)
    g = GroupLasso(strength, on=CONVOLUTIONS, by="filter")
    figure = FinalFigure(args.out / "figure.png", title="FedADMM with a group lasso")
    logger = AutoWandbLogger(project="lightning-fed", name="pruning", save_dir=str(args.out))
    trainer = pl.Trainer(
        max_epochs=3 if args.quick else args.rounds,
        accelerator="cpu",
        logger=logger,
        enable_checkpointing=False,
        enable_model_summary=False,
        limit_val_batches=0,  # the federated evaluation reads the test data already
        callbacks=[
            FederatedServer(FedADMM(eta=0.3, g=g, start="local"), 2 if args.quick else 10, local_steps=40),
            Sparsity(on=CONVOLUTIONS),
            figure,
        ],
    )
    began = time.monotonic()
    trainer.fit(net := SmallCNN(), datamodule=data)
    print(f"\n{len(figure.history)} rounds, {time.monotonic() - began:.0f} s")
    drawn = draw(figure.history)
    drawn.savefig(args.out / "pruning.png", dpi=120)
    log_figure([logger], "pruning/figure", drawn, len(figure.history) - 1)
    exact = without_zero_filters(net.double())
    before, labels = logits_of(net, data)
    torch.testing.assert_close(logits_of(exact, data)[0], before)  # in float64
    pruned = exact.float()
    after, _ = logits_of(pruned, data)
    report(net.float(), pruned, [float((scores.argmax(1) == labels).float().mean()) for scores in (before, after)])
    print(f"\nData:       {data.description}\nFigures:    {args.out / 'pruning.png'}, {figure.path}")
    if logger.experiment.offline:
        print(f"W&B:        offline; to view it here: wandb leet {args.out}/wandb")


def report(net: SmallCNN, pruned: SmallCNN, accuracies: list[float]) -> None:
    print("\n                 as trained    pruned")
    for name in ("conv1", "conv2"):
        counts = [len(getattr(model, name).weight) for model in (net, pruned)]
        print(f"{name} filters {counts[0]:13d}{counts[1]:10d}")
    for what, count in {"parameters": lambda t: t.numel(), "bytes": num_bytes}.items():
        counts = [sum(count(p) for p in model.parameters()) for model in (net, pruned)]
        print(f"{what:13s}{counts[0]:14,d}{counts[1]:10,d}")
    print(f"{'accuracy':13s}{accuracies[0]:14.1%}{accuracies[1]:10.1%}")


if __name__ == "__main__":
    main()
