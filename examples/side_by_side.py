"""FedADMM and FedAvg side by side
===============================

Train the same model on the same clients with two algorithms, and draw both accuracies by round.

30 clients whose data and labels differ, 10 of them per round, 100 SGD steps each. Two runs with one seed visit the same
clients and draw the same batches: only the algorithm differs.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import matplotlib.pyplot as plt
import pytorch_lightning as pl

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg
from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP


class Accuracies(pl.Callback):
    """Notes the server's test accuracy after every round."""

    def __init__(self) -> None:
        self.values: list[float] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.values.append(float(trainer.callback_metrics["federated/test_accuracy"]))


def accuracies(algorithm: Algorithm, seed: int, rounds: int = 40) -> list[float]:
    pl.seed_everything(seed, verbose=False)
    noted = Accuracies()
    trainer = pl.Trainer(
        max_epochs=rounds,
        callbacks=[FederatedServer(algorithm, clients_per_round=10, local_steps=100), noted],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(MLP(), datamodule=Synthetic(a=1, b=1))
    return noted.values


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--out", type=Path, default=Path("runs/side_by_side.png"), help="the figure's file")
    args = parser.parse_args()
    figure, axes = plt.subplots(figsize=(5.6, 3.6), layout="constrained")
    for algorithm, colour, place in ((FedADMM(eta="auto", mean="active"), "C4", "bottom"), (FedAvg(), "C7", "top")):
        name = type(algorithm).__name__
        runs = [accuracies(algorithm, seed, args.rounds) for seed in args.seeds]
        for seed, values in zip(args.seeds, runs, strict=True):
            print(f"{name}, seed {seed}: test accuracy {values[-1]:.2f} after {args.rounds} rounds")
            axes.plot(range(1, args.rounds + 1), values, colour, linewidth=0.8, alpha=0.5)
        mean = [sum(values) / len(runs) for values in zip(*runs, strict=True)]
        axes.plot(range(1, args.rounds + 1), mean, colour, linewidth=2.5)
        above, label = (0.02 if place == "bottom" else -0.1), f"{name} {mean[-1]:.2f}"
        axes.text(args.rounds, mean[-1] + above, label, color=colour, ha="right", va=place, weight="bold", fontsize=12)
    axes.set(xlabel="round", ylabel="test accuracy", xlim=(1, args.rounds), ylim=(0, 1.05))
    axes.set_title(f"30 unlike clients, 10 per round; {len(args.seeds)} seeds and their mean", fontsize=11)
    axes.grid(alpha=0.3)
    axes.spines[["top", "right"]].set_visible(False)
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=160)
    print(f"Figure: {args.out}")


if __name__ == "__main__":
    main()
