from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning_fed.core.table import Table
from lightning_fed.evaluation.names import ACCURACY, LOSS, SPREAD
from lightning_fed.lightning import pl
from lightning_fed.tracking.wandb import log_figure
from lightning_fed.trainer.hooks import is_server

if TYPE_CHECKING:
    from matplotlib.figure import Figure

#: Gives the place of a round on the horizontal axis.
X = Callable[[dict[str, float]], float]

PANELS = {
    "Objective and loss": ("federated/objective", "federated/train_loss", "federated/test_loss", "federated/val_loss"),
    "Accuracy": ("federated/train_accuracy", "federated/test_accuracy", "federated/val_accuracy"),
}
#: Beginnings of the names of metrics over all clients.
SPLITS = ("federated/train_", "federated/test_", "federated/val_")
#: Most metrics besides loss and accuracy in a figure, and most panels side by side.
MOST_FURTHER, MOST_COLUMNS = 4, 3


class FinalFigure(pl.Callback):
    """Draws the metrics of all rounds (``server.history``) by round and by megabytes when the fit ends.

    It draws loss and accuracy, and up to four further metrics, each with a band to its worst decile of clients.

    Args:
        path: PNG file for the figure, in addition to the loggers.
        title: heading of the figure; the description of the data follows below it.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))}, batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> server, figure = FederatedServer(FedAvg()), FinalFigure()
    >>> trainer = pl.Trainer(max_epochs=3, callbacks=[server, figure], **quiet)
    >>> trainer.fit(MLP((2, 2), lr=1.0), datamodule=data)
    >>> [row["round"] for row in figure.history]
    [0, 1, 2]
    >>> figure.history[2]["federated/objective"] < figure.history[0]["federated/objective"]
    True
    """

    def __init__(self, path: str | Path | None = None, title: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.title = title
        self._server: Any = None

    @property
    def history(self) -> Table:
        """``server.history``, which the figure draws."""
        return Table() if self._server is None else self._server.history

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._server = next((callback for callback in trainer.callbacks if is_server(callback)), None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero or not self.history or not (self.path or trainer.loggers):
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


def further_metrics(known: Iterable[str]) -> dict[str, list[str]]:
    """The first few metrics other than loss and accuracy: by metric, the names of its means."""
    names = list(known)
    beside = {f"{name}_{figure}" for name in names for figure in SPREAD}
    found: dict[str, list[str]] = {}
    for name in names:
        prefix = next((prefix for prefix in SPLITS if name.startswith(prefix)), None)
        if prefix is not None and name not in beside and (metric := name.removeprefix(prefix)) not in (LOSS, ACCURACY):
            found.setdefault(metric, []).append(name)
    return dict(list(found.items())[:MOST_FURTHER])


def draw(history: list[dict[str, float]], title: str | None = None) -> Figure:
    """Draw the history's curves by round and by megabytes; other metrics if there is no evaluation.

    Metrics other than loss and accuracy have a band from the mean to the worst decile of clients, or by the standard
    deviation to both sides where it is not known which side is worse.
    """
    from matplotlib.figure import Figure

    panels = _panels(list(dict.fromkeys(name for row in history for name in row if name != "round")))
    by: dict[str, X] = {"round": lambda row: row["round"] + 1}
    if any(megabytes(row) > 0 for row in history):
        by["megabytes received and sent"] = megabytes
    columns = min(len(panels), MOST_COLUMNS)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5 * columns, 3.6 * lines * len(by)), layout="constrained")
    grid = figure.subplots(lines * len(by), columns, squeeze=False)
    for block, (label, x) in enumerate(by.items()):
        cells = list(grid[block * lines : (block + 1) * lines].flat)
        for axes, (heading, names, banded) in zip(cells, panels, strict=False):
            _draw_panel(axes, history, names, x, banded)
            axes.set(xlabel=label, title=heading)
            if not block:
                axes.xaxis.get_major_locator().set_params(integer=True)
        for axes in cells[len(panels) :]:
            axes.remove()
    if title:
        figure.suptitle(title)
    return figure


def _panels(known: list[str]) -> list[tuple[str, list[str], bool]]:
    """Headings of panels, names of their curves, and whether these have bands."""
    usual = [(heading, [name for name in names if name in known]) for heading, names in PANELS.items()]
    panels = [(heading, names, False) for heading, names in usual if names] or [("Metrics", sorted(known)[:4], False)]
    return [*panels, *((_words(metric), names, True) for metric, names in further_metrics(known).items())]


def _draw_panel(axes: Any, history: list[dict[str, float]], names: list[str], x: X, banded: bool) -> None:
    """Draw curves by x, each with the band of its clients if there is one."""
    for name in names:
        points = [(x(row), row[name]) for row in history if name in row]
        (line,) = axes.plot(*zip(*points, strict=True), label=_words(name.removeprefix("federated/")))
        if banded and (found := _band(history, name)):
            what, edges = found
            xs, lows, highs = zip(*((x(row), low, high) for row, low, high in edges), strict=True)
            axes.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0, label=what)
    axes.grid(alpha=0.3)
    axes.legend()


def _band(history: list[dict[str, float]], name: str) -> tuple[str, list[tuple[dict[str, float], float, float]]] | None:
    """What a band shows, and its edges by row; None if no spread of the metric was logged."""
    worst, sd = f"{name}_worst_decile", f"{name}_sd"
    if rows := [row for row in history if name in row and worst in row]:
        return "to the worst decile", [(row, row[name], row[worst]) for row in rows]
    if rows := [row for row in history if name in row and sd in row]:
        return "standard deviation", [(row, row[name] - row[sd], row[name] + row[sd]) for row in rows]
    return None


def _words(name: str) -> str:
    return name.replace("_", " ")
