"""W&B runs of a checkpoint: noted when it is saved, found again when a fit or a test goes on from it."""

from __future__ import annotations

import pickle
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lightning_fed.core.server_part import RUNS
from lightning_fed.lightning import Logger, WandbLogger, rank_zero_info


def runs_of(loggers: Iterable[Logger]) -> list[dict[str, str]]:
    """Id, project and name of the runs that these loggers have opened, for a checkpoint."""
    opened = [logger.experiment for logger in loggers if isinstance(logger, WandbLogger) and logger.version]
    return [
        {"id": str(run.id), "project": str(run.project), "name": str(run.name or "")}
        for run in opened
        if not run.disabled
    ]


def read_runs(path: Any) -> tuple[list[dict[str, str]], int]:
    """The runs that a checkpoint was logged to, and its round; none if the file cannot be read.

    Lightning opens the loggers before it reads the checkpoint. A damaged or foreign file is reported when it does.
    """
    if path is None or "://" in str(path) or not Path(path).is_file():
        return [], 0
    try:
        loaded = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except (OSError, RuntimeError, EOFError, pickle.UnpicklingError):
        return [], 0
    if not isinstance(loaded, Mapping):
        return [], 0
    return list(loaded.get(RUNS, ())), int(loaded.get("global_step", 0))


def run_to_continue(runs: Sequence[Mapping[str, str]], project: str | None, name: str | None) -> str | None:
    """The id of the run of this project and, if a name is given, of this name; None if there is none, or several.

    >>> run_to_continue([{"id": "a1", "project": "p", "name": "n"}], "p", None)
    'a1'
    >>> run_to_continue([{"id": "a1", "project": "p", "name": "n"}], "p", "other")
    """
    found = [run["id"] for run in runs if run["project"] == project and name in (None, run["name"])]
    return found[0] if len(found) == 1 else None


def tell_of_new_runs(loggers: Iterable[Logger], runs: Sequence[Mapping[str, str]]) -> None:
    """Say how to continue the run of a checkpoint, where a logger has opened another one."""
    known = {run["id"] for run in runs}
    for logger in loggers:
        if not isinstance(logger, WandbLogger) or logger.version in {None, *known}:
            continue
        if (old := run_to_continue(runs, logger.name, None)) is not None:
            rank_zero_info(
                f"W&B logs to a new run, {logger.version}; the checkpoint was logged to run {old}. To continue that"
                f' run, give the logger id="{old}", or use lightning_fed.tracking.AutoWandbLogger with the same project'
                " and name."
            )
