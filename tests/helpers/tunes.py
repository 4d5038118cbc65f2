"""Commands of `lightning-fed tune` in tests, and what they leave in their folders."""

from __future__ import annotations

import csv
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import optuna
import pytest
import wandb
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend

import lightning_fed.configs
from lightning_fed.cli import main

CONFIG = Path(lightning_fed.configs.__file__).parent / "synthetic_fedadmm.yaml"
FIT = [
    *("--config", str(CONFIG), "--data.init_args.clients=3", "--federated.clients_per_round=2"),
    *("--federated.local_steps=2", "--trainer.logger=false", "--trainer.limit_val_batches=0"),
]
ETA = "--search=federated.algorithm.eta=log:0.1:10"


@contextmanager
def command_line() -> Iterator[None]:
    """Surroundings in which a command is run inside a test."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-fed"])  # Lightning warns where both args and sys.argv are given
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator
        yield
    wandb.finish()


def tune(out: Path, *args: str, fit: list[str] = FIT) -> None:
    """Compare trials by the training objective, as long as ``args`` say nothing else: without held-out data."""
    with command_line():
        main(["tune", "--objective=federated/objective", *fit, f"--out={out}", *args])


def table(out: Path) -> list[dict[str, str]]:
    with (out / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint_of(out: Path, number: int) -> Path:
    return out / "trials" / f"{number:04d}" / "checkpoint" / "last.ckpt"


def study(out: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(out / "optuna.log")))
    return optuna.load_study(study_name=out.name, storage=storage)


def legs(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out / "trials")) for path in out.glob("trials/*/rung_*.json"))
