"""Tables and histograms, in the form of each logger."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import numpy as np

from lightning_fed.lightning import CometLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger, rank_zero_only
from lightning_fed.tracking.folders import append, file_of, folder_of

Row = Sequence[Any]


@dataclass(frozen=True)
class Logged:
    """A table of a step, and distributions over its rows by name."""

    name: str
    columns: list[str]
    rows: list[list[Any]]
    step: int
    histograms: Mapping[str, Sequence[float]]

    @property
    def with_step(self) -> tuple[list[str], list[list[Any]]]:
        """Columns and rows with the step as the first column."""
        return ["step", *self.columns], [[self.step, *row] for row in self.rows]


@rank_zero_only
def log_table(
    loggers: Sequence[Logger],
    name: str,
    columns: Sequence[str],
    rows: Sequence[Row],
    step: int,
    histograms: Mapping[str, Sequence[float]] | None = None,
) -> None:
    """Log one row per client, in each logger's own form; unknown values stay blank.

    W&B, TensorBoard, MLflow and Comet get a table of their own kind. A logger that has a folder also gets the rows of
    all steps as CSV. ``histograms`` are distributions over the rows, by name, for trackers that draw them.

    >>> import tempfile
    >>> from pathlib import Path
    >>> from lightning_fed.lightning import CSVLogger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(folder)
    ...     log_table([logger], "clients", ["client", "loss"], [["ann", 0.5], ["bob", float("nan")]], step=3)
    ...     Path(logger.log_dir, "clients.csv").read_text().split()
    ['step,client,loss', '3,ann,0.5', '3,bob,']
    """
    blank = [[None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row] for row in rows]
    table = Logged(name, list(columns), blank, step, histograms or {})
    for logger in loggers:
        for kind, send in SENDERS.items():
            if isinstance(logger, kind):
                send(logger, table)
        if (folder := folder_of(logger)) is not None:
            append(file_of(folder, name, "csv"), *table.with_step, step)


def _to_wandb(logger: WandbLogger, table: Logged) -> None:
    import wandb

    drawn = {key: wandb.Histogram(list(values)) for key, values in table.histograms.items()}
    shown = wandb.Table(columns=[*table.columns], data=table.rows)
    # in one call: every call is a message to W&B's own process
    logger.experiment.log({table.name: shown, **drawn, "trainer/global_step": table.step})


def _to_tensorboard(logger: TensorBoardLogger, table: Logged) -> None:
    logger.experiment.add_text(table.name, _markdown(table.columns, table.rows), table.step)
    for key, values in table.histograms.items():
        logger.experiment.add_histogram(key, np.asarray(values), table.step)


def _to_mlflow(logger: MLFlowLogger, table: Logged) -> None:
    """A table of the step, which MLflow's page shows; it needs pandas. CSV without it.

    Not one table of all steps, which MLflow would download, with a progress bar, to append to it.
    """
    columns, rows = table.with_step
    if find_spec("pandas") is not None:
        data = {name: [row[i] for row in rows] for i, name in enumerate(columns)}
        logger.experiment.log_table(logger.run_id, data, f"{table.name}_step_{table.step}.json")
    else:
        text = io.StringIO()
        csv.writer(text).writerows([columns, *rows])
        logger.experiment.log_text(logger.run_id, text.getvalue(), f"{table.name}_step_{table.step}.csv")


def _to_comet(logger: CometLogger, table: Logged) -> None:
    logger.experiment.log_table(f"{table.name}_step_{table.step}.csv", table.rows, headers=table.columns)
    for key, values in table.histograms.items():
        logger.experiment.log_histogram_3d(list(values), name=key, step=table.step)


SENDERS: dict[type[Logger], Callable[[Any, Logged], None]] = {
    WandbLogger: _to_wandb,
    TensorBoardLogger: _to_tensorboard,
    MLFlowLogger: _to_mlflow,
    CometLogger: _to_comet,
}


def _markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
