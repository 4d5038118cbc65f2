"""Tables, histograms and figures for a trainer's loggers; a W&B logger that is offline without a key."""

from __future__ import annotations

import csv
import math
import netrc
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

import numpy as np

from lightning_fed.lightning import CSVLogger, Logger, TensorBoardLogger, WandbLogger, rank_zero_only
from lightning_fed.tracking.runs import read_runs, run_to_continue

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = Sequence[Any]


class AutoWandbLogger(WandbLogger):
    """Lightning's W&B logger that works offline when there is no key, and online when there is one.

    A fit or a test that starts from a checkpoint continues the run of that checkpoint, if it has the same project and,
    where a name is given, the same name. ``resume="never"`` starts a new run; so does another ``id``.

    Args:
        project: W&B project.
        save_dir: folder of the run's files.
        offline: whether to log offline; decided by the key if None.
        kwargs: other arguments of Lightning's ``WandbLogger``.

    >>> import tempfile
    >>> from unittest.mock import patch
    >>> with tempfile.TemporaryDirectory() as folder, patch.dict(os.environ, {"WANDB_MODE": "offline"}):
    ...     logger = AutoWandbLogger(project="demo", save_dir=f"{folder}/runs")  # the run itself begins with the fit
    ...     os.path.isdir(logger.save_dir)
    True
    """

    def __init__(
        self,
        project: str = "lightning-fed",
        save_dir: str = ".",
        name: str | None = None,
        offline: bool | None = None,
        **kwargs: Any,
    ) -> None:
        if offline is None:
            disabled = os.environ.get("WANDB_MODE") == "disabled"
            offline = not disabled and not has_wandb_key()
            kwargs |= {"mode": "disabled"} if disabled else {}
        save_dir = os.path.abspath(save_dir)  # W&B's own process may have been started in another folder
        os.makedirs(save_dir, exist_ok=True)
        super().__init__(project=project, save_dir=save_dir, name=name, offline=offline, **kwargs)
        self._first_step = 0

    def go_on_from(self, checkpoint: Any) -> None:
        """Continue the run of a checkpoint, or the run of this logger that ``wandb.finish()`` has ended.

        Called before each fit, validation, test and prediction of a federation, with the checkpoint it starts from.
        """
        import wandb

        if self._experiment is not None:
            if wandb.run is None and not self._experiment.disabled:
                self._wandb_init["id"], self._experiment = self._experiment.id, None
            return
        runs, step = read_runs(checkpoint)
        chosen = self._wandb_init["id"] or os.environ.get("WANDB_RUN_ID")
        if chosen or wandb.run is not None or self._wandb_init["resume"] == "never":
            return
        self._wandb_init["id"] = run_to_continue(runs, self._project, self._name)
        if self._wandb_init["id"] is not None:
            self._first_step = step

    def log_metrics(self, metrics: Mapping[str, float], step: int | None = None) -> None:
        """Log values; those of a test in a new process belong to the round of its checkpoint, not to round 0."""
        super().log_metrics(metrics, step if step is None else max(step, self._first_step))


def has_wandb_key() -> bool:
    """Whether W&B could log in: by the mode that is set, else a key in the environment or in netrc.

    >>> from unittest.mock import patch
    >>> for mode in ("online", "offline"):
    ...     with patch.dict(os.environ, {"WANDB_MODE": mode}):
    ...         print(mode, has_wandb_key())
    online True
    offline False
    """
    if mode := os.environ.get("WANDB_MODE"):
        return mode == "online"
    if os.environ.get("WANDB_API_KEY"):
        return True
    try:
        found = netrc.netrc(os.environ.get("NETRC")).hosts
    except (OSError, netrc.NetrcParseError):
        return False
    own_host = urlsplit(os.environ.get("WANDB_BASE_URL", "")).hostname
    return any("wandb" in host or host == own_host for host in found)


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

    ``histograms`` are distributions over the rows, by name; a CSV log has the values in the table already.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(folder)
    ...     log_table([logger], "clients", ["client", "loss"], [["ann", 0.5], ["bob", float("nan")]], step=3)
    ...     Path(logger.log_dir, "clients.csv").read_text().split()
    ['step,client,loss', '3,ann,0.5', '3,bob,']
    """
    rows = [[None if isinstance(cell, float) and math.isnan(cell) else cell for cell in row] for row in rows]
    histograms = histograms or {}
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            drawn = {key: wandb.Histogram(list(values)) for key, values in histograms.items()}
            table = wandb.Table(columns=list(columns), data=[list(row) for row in rows])
            # in one call: every call is a message to W&B's own process
            logger.experiment.log({name: table, **drawn, "trainer/global_step": step})
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_text(name, _markdown(columns, rows), step)
            for key, values in histograms.items():
                logger.experiment.add_histogram(key, np.asarray(values), step)
        elif isinstance(logger, CSVLogger):
            path = _folder(logger) / f"{name.replace('/', '_')}.csv"
            _append(path, ["step", *columns], [[step, *row] for row in rows])


def _append(path: Path, columns: list[str], rows: list[list[Any]]) -> None:
    """Append rows to a CSV file; if it has other columns, write the whole file again with those of both."""
    before: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            before = list(csv.reader(file))
    if before and before[0] == columns:
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        return
    old = before[0] if before else []
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*old, *columns])))
        writer.writeheader()
        writer.writerows(dict(zip(old, row, strict=True)) for row in before[1:])
        writer.writerows(dict(zip(columns, row, strict=True)) for row in rows)


@rank_zero_only
def log_figure(loggers: Sequence[Logger], name: str, figure: Figure, step: int) -> None:
    """Log a figure, as an image in W&B and TensorBoard and as a PNG beside a CSV log.

    >>> import tempfile
    >>> from matplotlib.figure import Figure
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(folder)
    ...     log_figure([logger], "curves/loss", Figure(figsize=(1, 1)), step=3)
    ...     [path.name for path in Path(logger.log_dir).glob("*.png")]
    ['curves_loss.png']
    """
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.experiment.log({name: wandb.Image(figure), "trainer/global_step": step})
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, step, close=False)
        elif isinstance(logger, CSVLogger):
            figure.savefig(_folder(logger) / f"{name.replace('/', '_')}.png", dpi=120)


def _folder(logger: CSVLogger) -> Path:
    folder = Path(logger.log_dir)
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _markdown(columns: Sequence[str], rows: Sequence[Row]) -> str:
    lines = [columns, ["---"] * len(columns), *rows]
    return "\n".join("| " + " | ".join(map(_cell, line)) + " |" for line in lines)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    return f"{value:.4g}" if isinstance(value, float) else str(value).replace("|", "\\|")
