"""FedADMM and FedDR on synthetic-(0,0), (0.5,0.5), (1,1) with the paper's settings, through ``Trainer.fit``.

Prints, by set, the mean and spread over seeds of objective and accuracy after the last round, and the largest
|x_bar(FedADMM) - x_bar(FedDR)| by round. float64: in float32 two correct runs separate after tens of rounds.

Usage: python benchmarks/synthetic.py [--sets 0,0.5,1] [--seeds 0,1,2,3,4] [--rounds 100] [--out runs/synthetic.jsonl]
"""

from __future__ import annotations

import argparse
import json
import logging
import statistics
import time
import warnings
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedDR
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP

MARKS = (1, 5, 10, 20, 40, 60, 80, 100)


class Silent(MLP):
    """Without metrics in training, which cost as much as the step; evaluation is `FederatedServer`'s."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.training:
            return nn.functional.cross_entropy(self(batch[0]), batch[1])
        return super().training_step(batch, batch_idx)


class Trace(FederatedCallback):
    def __init__(self) -> None:
        self.x_bar: list[Tensor] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.x_bar.append(torch.cat([p.detach().reshape(-1) for p in module.parameters()]))


def run(algorithm: Algorithm, s: float, seed: int, rounds: int) -> tuple[list[Tensor], dict[str, float]]:
    pl.seed_everything(seed, verbose=False)
    trace = Trace()
    server = FederatedServer(algorithm, clients_per_round=10, local_steps=300, seed=seed, evaluate_every=rounds)
    trainer = pl.Trainer(
        max_epochs=rounds,
        precision="64-true",
        accelerator="cpu",
        callbacks=[server, trace],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
    )
    trainer.fit(Silent(), datamodule=Synthetic(s, s, seed=seed, dtype="float64"))
    metrics = {k.removeprefix("federated/"): float(v) for k, v in trainer.callback_metrics.items()}
    return trace.x_bar, metrics


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", default="0,0.5,1")
    parser.add_argument("--seeds", default="0,1,2,3,4")
    parser.add_argument("--rounds", type=int, default=100)
    parser.add_argument("--out", type=Path, default=Path("runs/synthetic.jsonl"))
    args = parser.parse_args()
    torch.set_num_threads(1)
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.simplefilter("ignore")
    args.out.parent.mkdir(parents=True, exist_ok=True)
    for s in map(float, args.sets.split(",")):
        for seed in map(int, args.seeds.split(",")):
            began = time.monotonic()
            admm, metrics = run(FedADMM(eta=1.0), s, seed, args.rounds)
            dr, other = run(FedDR(eta_hat=1.0), s, seed, args.rounds)
            gaps = [float((a - b).abs().max()) for a, b in zip(admm, dr, strict=True)]
            row = {"set": s, "seed": seed, "rounds": args.rounds, "fedadmm": metrics, "feddr": other, "gap": gaps}
            with args.out.open("a") as file:
                file.write(json.dumps(row) + "\n")
            print(f"synthetic-({s:g},{s:g}) seed {seed}: {time.monotonic() - began:.0f} s", flush=True)
    report(args.out)


def report(path: Path) -> None:
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    for s in sorted({row["set"] for row in rows}):
        chosen = [row for row in rows if row["set"] == s]
        print(f"synthetic-({s:g},{s:g}), {chosen[0]['rounds']} rounds, seeds {[row['seed'] for row in chosen]}")
        for name in ("objective", "train_loss", "test_loss", "train_accuracy", "test_accuracy"):
            values = [row["fedadmm"][name] for row in chosen]
            spread = statistics.stdev(values) if len(values) > 1 else 0.0
            gap = max(abs(row["fedadmm"][name] - row["feddr"][name]) for row in chosen)
            print(f"  {name:15s} {statistics.mean(values):8.4f} +- {spread:.4f}   |FedADMM - FedDR| <= {gap:.1e}")
        gaps = {k: max(row["gap"][k - 1] for row in chosen) for k in MARKS if k <= chosen[0]["rounds"]}
        print("  max |x_bar gap| by round: " + ", ".join(f"{k}: {gap:.0e}" for k, gap in gaps.items()))


if __name__ == "__main__":
    main()
