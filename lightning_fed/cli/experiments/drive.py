"""Many runs under one bar; an interrupted command goes on when it is given again."""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence

from tqdm.auto import tqdm

from lightning_fed.cli.experiments.run import Run

_BAR = "{desc}: {percentage:3.0f}%|{bar}| {n:.1f}/{total} rounds [{elapsed}<{remaining}]"


def drive(runs: Sequence[Run]) -> None:
    """Run what is not there yet, without Lightning's own words."""
    # Large vectors on huge pages: half the time of a step on the network, where each gradient is a new allocation.
    os.environ.setdefault("THP_MEM_ALLOC_ENABLE", "1")
    os.environ.setdefault("WANDB_SILENT", "true")  # it would write through the bar
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    warnings.filterwarnings("ignore", module="pytorch_lightning")
    try:
        _go(runs)
    except (KeyboardInterrupt, SystemExit):  # Lightning turns the first into the second
        print("\nInterrupted. The same command goes on from here.")
        raise SystemExit(130) from None


def _go(runs: Sequence[Run]) -> None:
    total = sum(run.rounds for run in runs)
    done = sum(run.rounds if run.done else run.resumes_at() for run in runs)
    with tqdm(total=total, initial=done, unit=" rounds", bar_format=_BAR, smoothing=0.05) as bar:
        for run in runs:
            if not run.done:
                bar.set_description_str(f"{run.setting.name} {run.label} seed {run.seed}")
                run.go(lambda step: bar.update(min(step, bar.total - bar.n)))  # thirds do not add up to one
