"""Run many runs under one progress bar, skipping what an interrupted command has done."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from tqdm.auto import tqdm

from lightning_fed.cli.experiments.run import Run
from lightning_fed.lightning.package import FABRIC, TRAINER

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} rounds [{elapsed}<{remaining}]"


def quiet() -> None:
    """Silence Lightning and W&B."""
    # Huge pages for large vectors halve the time of a step of the network, where each gradient is a new allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("WANDB_SILENT", "true")  # its messages would break the bar
    for name in (TRAINER, FABRIC):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=TRAINER)


@contextmanager
def resumable() -> Iterator[None]:
    """When interrupted, say how to resume."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        print("\nInterrupted. Repeat the command to resume.")
        raise SystemExit(130) from None


def drive(runs: Sequence[Run]) -> None:
    """Run the unfinished runs, without Lightning's messages."""
    quiet()
    with resumable():
        _go(runs)


def _go(runs: Sequence[Run]) -> None:
    total = sum(run.rounds for run in runs)
    done = sum(run.rounds if run.done else run.resumes_at() for run in runs)
    with tqdm(total=total, initial=done, unit=" rounds", bar_format=_BAR, smoothing=0.05) as bar:
        for run in runs:
            if not run.done:
                bar.set_description_str(f"{run.setting.name} {run.label} seed {run.seed}")
                run.go(lambda step: bar.update(min(step, bar.total - bar.n)))  # thirds do not add up to one
