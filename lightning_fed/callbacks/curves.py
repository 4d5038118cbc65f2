"""Draw the metrics of a fit by round, and by megabytes where these are not a mere rescaling of rounds."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

from lightning_fed.evaluation.names import ACCURACY, LOSS, SPREAD

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Row = dict[str, float]
#: Gives the place of a round on the horizontal axis.
X = Callable[[Row], float]

ROUND, MEGABYTES = "round", "megabytes received and sent"
OBJECTIVE = "federated/objective"
#: Beginnings of the names of metrics over all clients, with the colours and widths of their curves in every panel: a
#: later curve is thinner, so that equal ones are all seen.
SPLITS: dict[str, tuple[str, float]] = {
    "federated/train_": ("tab:blue", 3.0),
    "federated/val_": ("tab:green", 2.0),
    "federated/test_": ("tab:orange", 1.3),
}
#: Headings of the usual panels, their vertical axes, and the names of their curves.
PANELS = {
    "Objective and loss": (LOSS, [OBJECTIVE, *(f"{split}{LOSS}" for split in SPLITS)]),
    "Accuracy": (ACCURACY, [f"{split}{ACCURACY}" for split in SPLITS]),
}
#: Most metrics besides loss and accuracy in a figure, and most panels side by side.
MOST_FURTHER, MOST_COLUMNS = 4, 3
#: Most ticks of the axis that counts megabytes, whose labels are long.
MOST_TICKS = 5
#: Characters of text that fit over one panel, and beside or inside it.
CHARACTERS, INSIDE = 55, 36
#: Counters, which say nothing of a model.
COUNTERS = {"clients", "bytes_down", "bytes_up", "local_steps", "full_gradients", "failed_clients", "seconds"}
#: Largest relative difference of the bytes of two rounds that counts as none.
ALIKE = 0.01

#: Heading of a panel, label of its vertical axis, names of its curves, and whether these have bands.
Panel = tuple[str, str, list[str], bool]


def megabytes(row: Row) -> float:
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


def megabytes_by_round(history: Sequence[Row]) -> tuple[float, float] | None:
    """``(a, b)`` if a + b * round megabytes have been sent after every round; None if rounds send unlike amounts.

    >>> rows = [{"round": k, "federated/bytes_down": 2e6 * (k + 1), "federated/bytes_up": 1e6} for k in range(3)]
    >>> megabytes_by_round(rows)
    (1.0, 2.0)
    """
    points = [(row["round"] + 1, megabytes(row)) for row in history if megabytes(row) > 0]
    slopes = [(y2 - y1) / (x2 - x1) for (x1, y1), (x2, y2) in pairwise(points)] or [y / x for x, y in points]
    if not slopes or min(slopes) <= 0 or max(slopes) > (1 + ALIKE) * min(slopes):
        return None
    (first, sent), slope = points[0], sum(slopes) / len(slopes)
    return sent - slope * first, slope


def draw(history: list[Row], title: str | None = None, settings: str | None = None) -> Figure:
    """Draw the history's curves by round; other metrics if there is no evaluation.

    An axis above the panels counts megabytes. If rounds send unlike amounts, there are panels by megabytes instead.
    Metrics other than loss and accuracy have a band from the mean to the worst decile of clients, or by the standard
    deviation to both sides where it is not known which side is worse. ``settings`` are printed below.
    """
    from matplotlib.figure import Figure

    panels = _panels(list(dict.fromkeys(name for row in history for name in row if name != "round")))
    scale = megabytes_by_round(history)
    by: dict[str, X] = {ROUND: lambda row: row["round"] + 1}
    if scale is None and any(megabytes(row) > 0 for row in history):
        by[MEGABYTES] = megabytes
    columns = min(len(panels), MOST_COLUMNS)
    lines = math.ceil(len(panels) / columns)
    figure = Figure(figsize=(5.2 * columns, 3.7 * lines * len(by) + 0.7), layout="constrained")
    grid = figure.subplots(lines * len(by), columns, squeeze=False)
    for block, (label, x) in enumerate(by.items()):
        cells = list(grid[block * lines : (block + 1) * lines].flat)
        for axes, panel in zip(cells, panels, strict=False):
            _draw_panel(axes, history, panel, x)
            axes.set_xlabel(label)
            if label == ROUND:
                axes.xaxis.get_major_locator().set_params(integer=True, min_n_ticks=1)
                _add_megabytes(axes, scale)
        for axes in cells[len(panels) :]:
            axes.remove()
    width = CHARACTERS * columns
    if title:
        figure.suptitle(_wrapped(title, width))
    if settings:
        figure.supxlabel(_wrapped(settings, round(1.2 * width)), fontsize="small", color="0.35")
    return figure


def _wrapped(text: str, width: int) -> str:
    return "\n".join("\n".join(textwrap.wrap(line, width)) for line in text.splitlines())


def _panels(known: list[str]) -> list[Panel]:
    usual = [(heading, label, [name for name in names if name in known]) for heading, (label, names) in PANELS.items()]
    panels: list[Panel] = [(heading, label, names, False) for heading, label, names in usual if names]
    further = further_metrics(known).items()
    if not panels and not further:
        panels = [("Metrics", "value", _usual(known), False)]
    return [*panels, *((_words(metric), _words(metric), names, True) for metric, names in further)]


def _usual(known: list[str]) -> list[str]:
    """A few metrics to draw where clients are not evaluated: losses first, no counters unless there is nothing else."""
    names = [name for name in known if name.removeprefix("federated/") not in COUNTERS] or known
    return sorted(names, key=lambda name: LOSS not in name.lower())[:4]


def _draw_panel(axes: Any, history: list[Row], panel: Panel, x: X) -> None:
    """Draw curves by x, each with the band of its clients if there is one."""
    heading, label, names, banded = panel
    for name in names:
        points = [(x(row), row[name]) for row in history if name in row]
        (line,) = axes.plot(
            *zip(*points, strict=True), label=_short(_words(name.removeprefix("federated/")), INSIDE), **_style(name)
        )
        if len(points) == 1:
            line.set_marker("o")  # a line through one point is not seen
        if banded and (found := _band(history, name)):
            what, edges = found
            xs, lows, highs = zip(*((x(row), low, high) for row, low, high in edges), strict=True)
            axes.fill_between(xs, lows, highs, color=line.get_color(), alpha=0.2, linewidth=0, label=what)
    axes.set(title=_short(heading, CHARACTERS), ylabel=_short(label, INSIDE))
    axes.grid(alpha=0.3)
    axes.legend()


def _style(name: str) -> dict[str, Any]:
    if name == OBJECTIVE:
        return {"color": "black", "linestyle": "--"}
    found = next((style for prefix, style in SPLITS.items() if name.startswith(prefix)), None)
    return {} if found is None else dict(zip(("color", "linewidth"), found, strict=True))


def _add_megabytes(axes: Any, scale: tuple[float, float] | None) -> None:
    """Count megabytes on an axis above, on which a round is as long as on the axis below."""
    from matplotlib.ticker import MaxNLocator

    if scale is not None:
        first, slope = scale
        above = axes.secondary_xaxis(
            "top", functions=(lambda round: first + slope * round, lambda sent: (sent - first) / slope)
        )
        above.set_xlabel(MEGABYTES, fontsize="small", color="0.35")
        above.xaxis.set_major_locator(MaxNLocator(MOST_TICKS))
        above.tick_params(labelsize="small", colors="0.35")


def _band(history: list[Row], name: str) -> tuple[str, list[tuple[Row, float, float]]] | None:
    """What a band shows, and its edges by row; None if no spread of the metric was logged."""
    worst, sd = f"{name}_worst_decile", f"{name}_sd"
    if rows := [row for row in history if name in row and worst in row]:
        return "to the worst decile", [(row, row[name], row[worst]) for row in rows]
    if rows := [row for row in history if name in row and sd in row]:
        return "standard deviation", [(row, row[name] - row[sd], row[name] + row[sd]) for row in rows]
    return None


def _short(text: str, width: int) -> str:
    """The text, without its middle if it is longer than ``width``: it would push the panels aside."""
    half = (width - 3) // 2
    return text if len(text) <= width else f"{text[:half]}...{text[-half:]}"


def _words(name: str) -> str:
    return name.replace("_", " ")
