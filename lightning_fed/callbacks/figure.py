from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fed.lightning import pl, results_of, validation_results_of
from lightning_fed.tracking.wandb import log_figure

if TYPE_CHECKING:
    from matplotlib.figure import Figure

PANELS = {
    "Objective and loss": ("federated/objective", "federated/train_loss", "federated/test_loss", "federated/val_loss"),
    "Accuracy": ("federated/train_accuracy", "federated/test_accuracy", "federated/val_accuracy"),
}


class FinalFigure(pl.Callback):
    """Keeps every metric of every round, and draws loss and accuracy by round and by megabytes when the fit ends.

    Args:
        path: PNG file for the figure, in addition to the loggers.
        title: heading of the figure; the description of the data follows below it.
    """

    def __init__(self, path: str | Path | None = None, title: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.title = title
        self.history: list[dict[str, float]] = []
        self._validated: dict[str, Any] = {}

    def state_dict(self) -> dict[str, Any]:
        return {"history": self.history}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.history = list(state_dict["history"])

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not trainer.sanity_checking:
            self._validated = validation_results_of(trainer).metrics(on_step=False)["callback"]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        # not trainer.callback_metrics, which also holds metrics of earlier rounds
        trained = results_of(trainer).metrics(on_step=False)["callback"]
        metrics = (
            {**trained, **self._validated} if trained else trainer.callback_metrics
        )  # a resumed round has only these
        self._validated = {}
        self.history.append({"round": trainer.current_epoch, **{name: float(v) for name, v in metrics.items()}})

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        if not self.history or not (self.path or trainer.loggers):
            return
        description = getattr(trainer.datamodule, "description", "")
        figure = draw(self.history, "\n".join(filter(None, [self.title, description])))
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.path, dpi=120)
        log_figure(trainer.loggers, "federated/figure", figure, int(self.history[-1]["round"]))


def megabytes(row: dict[str, float]) -> float:
    """Megabytes that clients have received and sent up to a round; nan if they were not counted."""
    return (row.get("federated/bytes_down", math.nan) + row.get("federated/bytes_up", math.nan)) / 1e6


def draw(history: list[dict[str, float]], title: str | None = None) -> Figure:
    """Draw the history's curves by round and by megabytes; other metrics if there is no evaluation."""
    from matplotlib.figure import Figure

    known = {name for row in history for name in row} - {"round"}
    panels = {heading: [name for name in names if name in known] for heading, names in PANELS.items()}
    panels = {heading: names for heading, names in panels.items() if names} or {"Metrics": sorted(known)[:4]}
    by: dict[str, Callable[[dict[str, float]], float]] = {"round": lambda row: row["round"] + 1}
    if any(megabytes(row) > 0 for row in history):
        by["megabytes received and sent"] = megabytes
    figure = Figure(figsize=(5 * len(panels), 3.6 * len(by)), layout="constrained")
    grid = figure.subplots(len(by), len(panels), squeeze=False)
    for line, (label, x) in zip(grid, by.items(), strict=True):
        for axes, (heading, names) in zip(line, panels.items(), strict=True):
            for name in names:
                points = [(x(row), row[name]) for row in history if name in row]
                axes.plot(*zip(*points, strict=True), label=name.removeprefix("federated/").replace("_", " "))
            axes.set(xlabel=label, title=heading)
            axes.grid(alpha=0.3)
            axes.legend()
    for axes in grid[0]:
        axes.xaxis.get_major_locator().set_params(integer=True)
    if title:
        figure.suptitle(title)
    return figure
