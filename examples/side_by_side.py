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
    figure, axes = plt.subplots(figsize=(6.4, 3.2), layout="constrained")
    for algorithm, colour in ((FedADMM(eta="auto", mean="active"), "C4"), (FedAvg(), "C7")):
        for seed in args.seeds:
            values = accuracies(algorithm, seed, args.rounds)
            name = type(algorithm).__name__
            label = f"{name}, {len(args.seeds)} seeds" if len(args.seeds) > 1 else name
            print(f"{name}, seed {seed}: test accuracy {values[-1]:.2f} after {args.rounds} rounds")
            axes.plot(range(1, len(values) + 1), values, colour, label=label if seed == args.seeds[0] else None)
    axes.set(xlabel="round", ylabel="test accuracy of the server's model", ylim=(0, 1))
    axes.set_title("30 clients with unlike data, 10 per round (synthetic-(1,1), an MLP)", fontsize=10)
    axes.grid(alpha=0.3)
    axes.legend(loc="lower right")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(args.out, dpi=110)
    print(f"Figure: {args.out}")


if __name__ == "__main__":
    main()
