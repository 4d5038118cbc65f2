"""Memory, disk and time of a federation with many clients: ``python benchmarks/memory.py --help``.

Prints one line for every few rounds: resident memory, seconds of the round and of its checkpoint, bytes on disk. With
``--both``, rounds of a run in RAM and of one on disk take turns, so that their ratio does not depend on the hour.
"""

from __future__ import annotations

import argparse
import json
import shutil
import statistics
import tempfile
import time
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.models import MLP, FemnistCNN


def rss() -> float:
    """Resident memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def data(clients: int, samples: int, flat: bool) -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    x = torch.rand(clients * samples, 1, 28, 28, generator=g)
    y = torch.randint(62, (clients * samples,), generator=g)
    x = x.flatten(1) if flat else x
    parts = zip(x.split(samples), y.split(samples), strict=True)
    return FederatedDataModule({f"f{i:04}": TensorDataset(*part) for i, part in enumerate(parts)}, batch_size=10)


class Clock(pl.Callback):
    """Notes every round."""

    def __init__(self, every: int, folder: Path) -> None:
        self.every, self.folder = every, folder
        self.rounds: list[dict[str, Any]] = []
        self._began = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = time.perf_counter()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        seconds = time.perf_counter() - self._began
        server = trainer.fit_loop.server
        visited = len(server.federation.store)
        self.rounds.append({"round": trainer.current_epoch, "seconds": seconds, "visited": visited, "rss": rss()})

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        began = time.perf_counter()
        path = self.folder / "timed.ckpt"
        trainer.save_checkpoint(path)
        now = self.rounds[-1]
        now["save"] = time.perf_counter() - began
        now["ckpt_mb"] = path.stat().st_size / 1e6
        trainer.strategy.remove_checkpoint(path)
        if now["round"] % self.every == 0:
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in now.items()}), flush=True)


def run(args: argparse.Namespace, store: str) -> list[dict[str, Any]]:
    module: Any = FemnistCNN() if args.model == "cnn" else MLP((784, 64, 62))
    folder = Path(tempfile.mkdtemp(dir=args.dir))
    clock = Clock(args.every, folder)
    server = FederatedServer(
        FedADMM(eta=1.0), args.cohort, local_steps=args.steps, evaluate_every=0, figure=False, store=store
    )
    keep = [] if args.no_checkpoints else [ModelCheckpoint(folder, save_last=False)]
    trainer = pl.Trainer(
        max_epochs=args.rounds,
        callbacks=[server, clock, *keep],
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=bool(keep),
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    trainer.fit(module, datamodule=data(args.clients, args.samples, args.model == "mlp"))
    size = sum(f.stat().st_size for f in {f.stat().st_ino: f for f in folder.rglob("*") if f.is_file()}.values())
    model = sum(p.numel() * p.element_size() for p in module.parameters())
    visited = len(server.federation.store)
    print(f"{store}: {visited} visited, {size / 1e9:.2f} GB on disk, {size / visited / model:.2f} models per client")
    shutil.rmtree(folder, ignore_errors=True)
    return clock.rounds


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=["cnn", "mlp"], default="cnn")
    parser.add_argument("--clients", type=int, default=3500)
    parser.add_argument("--cohort", type=int, default=10)
    parser.add_argument("--samples", type=int, default=10)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=80)
    parser.add_argument("--every", type=int, default=5)
    parser.add_argument("--dir", default=".")
    parser.add_argument("--no-checkpoints", action="store_true")
    parser.add_argument("--both", action="store_true", help="a run in RAM, then one on disk")
    args = parser.parse_args()
    found = {store: run(args, store) for store in (("memory", "disk") if args.both else ("disk",))}
    for store, rounds in found.items():
        seconds = [r["seconds"] for r in rounds[1:]]
        saves = [r["save"] for r in rounds]
        first, last = statistics.median(saves[: len(saves) // 4 + 1]), statistics.median(saves[-len(saves) // 4 :])
        peak = max(r["rss"] for r in rounds)
        print(
            f"{store}: {statistics.median(seconds):.3f} s a round, peak {peak:.0f} MB, save {first:.3f} s at first,"
            f" {last:.3f} s at last"
        )


if __name__ == "__main__":
    main()
