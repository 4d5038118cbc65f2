"""FedADMM on synthetic-(1,1) with the paper's settings, through a stock Trainer; `make demo` runs this.

30 clients, 10 per round, 300 SGD steps of batch 2, learning rate 0.01, penalty 1. Ends with a figure.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FinalFigure
from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP
from lightning_fed.tracking import AutoWandbLogger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument("--resume", action="store_true", help="go on from the last checkpoint in --out")
    args = parser.parse_args()
    torch.set_num_threads(1)  # on a model this small a second thread only costs
    pl.seed_everything(0, verbose=False)
    figure = FinalFigure(args.out / "figure.png", title="FedADMM on synthetic-(1,1)")
    logger = AutoWandbLogger(project="lightning-fed", name="demo", save_dir=str(args.out))
    trainer = pl.Trainer(
        max_epochs=args.rounds,
        accelerator="cpu",
        logger=logger,
        enable_model_summary=False,
        callbacks=[
            FederatedServer(FedADMM(eta=1.0), clients_per_round=10, local_steps=300),
            ModelCheckpoint(args.out / "checkpoints", save_last=True, enable_version_counter=False),
            figure,
        ],
    )
    began = time.monotonic()
    trainer.fit(MLP(), datamodule=Synthetic(1, 1), ckpt_path="last" if args.resume else None)
    summarise(figure.history, time.monotonic() - began)
    print(f"Figure:     {figure.path}")
    print(f"Checkpoint: {args.out}/checkpoints/last.ckpt; to go on: make demo ARGS='--resume --rounds 100'")
    if logger.experiment.offline:
        print(f"W&B:        offline; to upload: wandb sync {args.out}/wandb/latest-run")


def summarise(history: list[dict[str, float]], seconds: float) -> None:
    """First, middle and last round in a small table."""
    columns = ("objective", "train_accuracy", "test_accuracy", "primal_residual", "bytes_up")
    print("\nround  " + "  ".join(f"{name:>15s}" for name in columns))
    for row in (history[0], history[len(history) // 2], history[-1]):
        cells = [f"{row.get(f'federated/{name}', float('nan')):15.5g}" for name in columns]
        print(f"{int(row['round']) + 1:5d}  " + "  ".join(cells))
    print(f"\n{len(history)} rounds, {seconds:.0f} s")


if __name__ == "__main__":
    main()
