"""Run many runs under one progress bar, or with a line per run, skipping what an interrupted command has done."""

from __future__ import annotations

import logging
import os
import sys
import time
import warnings
from collections.abc import Sequence

from tqdm.auto import tqdm

from lightning_fed.callbacks.console import is_screen
from lightning_fed.cli.experiments.pace import Pace
from lightning_fed.cli.experiments.run import Run
from lightning_fed.cli.interruption import check_interrupted, resumable
from lightning_fed.lightning.package import FABRIC, TRAINER

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} rounds [{elapsed}{postfix}]"


def quiet() -> None:
    """Silence Lightning and W&B."""
    # Huge pages for large vectors halve the time of a step of the network, where each gradient is a new allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("WANDB_SILENT", "true")  # its messages would break the bar
    for name in (TRAINER, FABRIC):
        logging.getLogger(name).setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module=TRAINER)


def drive(runs: Sequence[Run]) -> None:
    """Run the unfinished runs, without Lightning's messages."""
    quiet()
    with resumable():
        _go(runs)


def _go(runs: Sequence[Run]) -> None:
    total = sum(run.rounds for run in runs)
    done = sum(run.rounds if run.done else run.resumes_at() for run in runs)
    pace = Pace([run for run in runs if not run.done])
    lines = not is_screen()
    with tqdm(total=total, initial=done, unit=" rounds", bar_format=_BAR, disable=lines) as bar:

        def tick(step: float) -> None:
            pace.tick(step)
            if lines:
                return
            bar.set_postfix_str(pace.left(), refresh=False)
            bar.update(min(step, bar.total - bar.n))  # thirds do not add up to one

        for run in pace.order:
            check_interrupted()
            name, began = f"{run.setting.name} {run.label} seed {run.seed}", time.monotonic()
            bar.set_description_str(name)
            pace.begin(run)
            run.go(tick)
            pace.end()
            if lines:
                print(f"{name}: {time.monotonic() - began:.1f} s, {pace.left()}", file=sys.stderr, flush=True)
