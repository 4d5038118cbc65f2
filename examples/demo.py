"""LEAF's CNN on handwriting
============================

Train LEAF's CNN for FEMNIST with FedADMM in a stock Trainer, on generated handwriting; `make demo` runs this.

20 writers, 10 of them per round, 20 SGD steps each. Ends with a figure and the most frequent mistakes.
"""

# sphinx_gallery_thumbnail_path = "demo.png"

from __future__ import annotations

import argparse
import time
from pathlib import Path

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import Confusion, FinalFigure
from lightning_fed.datamodules import FEMNIST
from lightning_fed.models import FemnistCNN
from lightning_fed.tracking import AutoWandbLogger


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--data", type=Path, help="LEAF JSON, npz by writer, parquet or NIST instead of generated data")
    parser.add_argument("--out", type=Path, default=Path("runs/demo"))
    parser.add_argument(
        "--threads", type=int, default=1, help="number of torch's threads; more than 1 help only on an idle machine"
    )
    parser.add_argument("--resume", action="store_true", help="resume from the last checkpoint in --out")
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    pl.seed_everything(0, verbose=False)
    data = FEMNIST(args.data, writers=20, batch_size=20, pixels={"invert": True})
    figure = FinalFigure(args.out / "figure.png", title="LEAF's CNN by FedADMM")
    confusion = Confusion(args.out / "confusion.png", top=8)
    logger = AutoWandbLogger(project="lightning-fed", name="demo", save_dir=str(args.out))
    trainer = pl.Trainer(
        max_epochs=args.rounds,
        accelerator="cpu",
        logger=logger,
        enable_model_summary=False,
        limit_val_batches=0,  # the federated evaluation reads the test data already
        callbacks=[
            FederatedServer(FedADMM(eta="auto", mean="active"), clients_per_round=10, local_steps=20),
            ModelCheckpoint(  # a client's state is 26 MB: save once at the end, or on interruption
                args.out / "checkpoints",
                filename="last",  # one file, 660 MB; save_last=True would copy it
                every_n_epochs=args.rounds,
                save_on_exception=True,
                enable_version_counter=False,
            ),
            figure,
            confusion,
        ],
    )
    began = time.monotonic()
    trainer.fit(FemnistCNN(lr=0.1, log_train=False), datamodule=data, ckpt_path="last" if args.resume else None)
    summarise(figure.history, time.monotonic() - began)
    print(f"\nData:       {data.description}")
    print(f"Accuracy:   {figure.history[-1]['federated/test_accuracy']:.1%} on characters that no writer trained on")
    mistakes = [f"{true} taken for {taken} ({n} of {of})" for true, taken, n, of in confusion.mistakes()]
    print("Mistakes:   " + ", ".join(mistakes))
    print(f"Figures:    {figure.path}, {confusion.path}")
    checkpoint = args.out / "checkpoints" / "last.ckpt"
    print(f"Checkpoint: {checkpoint}, {checkpoint.stat().st_size / 1e6:.0f} MB with what the clients remember")
    print("To resume:  make demo ARGS='--resume --rounds 40'")
    print("Your data:  make demo ARGS='--data FOLDER_OR_FILE'; see docs/data.md and configs/femnist_fedadmm.yaml")
    if logger.experiment.offline:
        run = f"{args.out}/wandb/latest-run"
        print(f"W&B:        offline; to view it here: wandb leet {args.out}/wandb; to upload it: wandb sync {run}")


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
