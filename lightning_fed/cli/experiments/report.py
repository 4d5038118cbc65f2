"""Figures and tables of an experiment, from the folders of its runs."""

from __future__ import annotations

import csv
import statistics
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fed.callbacks.curves import megabytes
from lightning_fed.cli.experiments.run import MARKS, Run

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Metrics of figures and tables, by their names in the logs.
CURVES = {
    "objective": "objective",
    "train_accuracy": "train accuracy",
    "test_accuracy": "test accuracy",
}
BY_BYTES = ("objective", "test_accuracy")
COLUMNS = ("objective", "train_loss", "train_accuracy", "test_loss", "test_accuracy")
SPENT = ("bytes_down", "bytes_up", "local_steps", "full_gradients")

#: Horizontal axes of curves: the position of a row of the history.
X = {"round": lambda row: row["round"] + 1, "megabytes received and sent": megabytes}
ROUND, MEGABYTES = X


def grouped(runs: Sequence[Run]) -> dict[str, dict[str, list[Run]]]:
    """Runs by setting and algorithm."""
    found: dict[str, dict[str, list[Run]]] = {}
    for run in runs:
        found.setdefault(run.setting.name, {}).setdefault(run.label, []).append(run)
    return found


def gaps(one: Sequence[Run], other: Sequence[Run]) -> dict[int, float]:
    """Largest entry of |x_bar - x_bar'| over the common seeds, by round."""
    found: dict[int, float] = {}
    partners = {run.seed: run for run in other}
    for run in one:
        for round in sorted({run.rounds, *(mark for mark in MARKS if mark < run.rounds)}):
            if (partner := partners.get(run.seed)) is None:
                continue
            x, y = run.x_bar(round), partner.x_bar(round)
            if x is not None and y is not None:
                found[round] = max(found.get(round, 0.0), float(np.abs(x - y).max()))
    return found


def write_csv(runs: Sequence[Run], path: Path) -> None:
    """Write every metric of every round of every run, with the clients' costs so far, to one long table."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["setting", "algorithm", "seed", "round", *COLUMNS, *SPENT])
        for run in runs:
            for i, row in enumerate(run.history(), start=1):
                cells = [row.get(f"federated/{name}", "") for name in COLUMNS]
                cells += [int(row[f"federated/{name}"]) if f"federated/{name}" in row else "" for name in SPENT]
                writer.writerow([run.setting.name, run.label, run.seed, i, *cells])


def table(algorithms: dict[str, list[Run]]) -> str:
    """Mean and spread over seeds by round, megabytes, and the difference of the first two algorithms."""
    labels = list(algorithms)
    apart = gaps(algorithms[labels[0]], algorithms[labels[1]]) if len(labels) > 1 else {}
    rounds = min(len(run.history()) for runs in algorithms.values() for run in runs)
    marks = [mark for mark in sorted({*MARKS, rounds}) if mark <= rounds]
    header = f"{'round':>5s}  {'algorithm':12s}" + "".join(f"{name:>20s}" for name in CURVES) + f"{'megabytes':>11s}"
    lines = [header + (f"  max |x_bar({labels[0]}) - x_bar({labels[1]})|" if apart else "")]
    for mark in marks:
        for label, runs in algorithms.items():
            rows = [run.history()[mark - 1] for run in runs]
            cells = [spread([row.get(f"federated/{name}") for row in rows]) for name in CURVES]
            sent = f"{statistics.mean(megabytes(row) for row in rows):11.4g}"
            gap = f"  {apart[mark]:.1e}" if label == labels[0] and mark in apart else ""
            lines.append(f"{mark:5d}  {label:12s}" + "".join(f"{cell:>20s}" for cell in cells) + sent + gap)
    return "\n".join(lines)


def largest_differences(algorithms: dict[str, list[Run]]) -> dict[str, float]:
    """Largest difference of each metric between the first two algorithms, over rounds and seeds."""
    first, *others = list(algorithms.values())[:2]
    partners = {run.seed: run.history() for runs in others for run in runs}
    found = dict.fromkeys(COLUMNS, 0.0)
    for run in first:
        for row, other in zip(run.history(), partners.get(run.seed, []), strict=False):
            for name in COLUMNS:
                if (key := f"federated/{name}") in row and key in other:
                    found[name] = max(found[name], abs(row[key] - other[key]))
    return found


def figure(settings: dict[str, dict[str, list[Run]]]) -> Figure:
    """One row per setting: loss and accuracy by round and by bytes, all algorithms in one plot with a band over the
    seeds; and the difference of the first two."""
    from matplotlib.figure import Figure

    panels = [*((metric, ROUND) for metric in CURVES), *((metric, MEGABYTES) for metric in BY_BYTES)]
    drawn = Figure(figsize=(4 * len(panels) + 4, 3.6 * len(settings)), layout="constrained")
    rows = drawn.subplots(len(settings), len(panels) + 1, squeeze=False)
    for axes, (name, algorithms) in zip(rows, settings.items(), strict=True):
        for panel, (metric, by) in zip(axes, panels, strict=False):
            for i, (label, runs) in enumerate(algorithms.items()):
                # the first curve is broad and pale, so that an equal second one leaves both visible
                thin = {"linewidth": 1.3, "linestyle": ["--", "-"][i > 1]}
                curve(panel, runs, metric, by, label=label, **({"linewidth": 5, "alpha": 0.35} if i == 0 else thin))
            panel.set(title=CURVES[metric], xlabel=by)
            panel.grid(alpha=0.3)
        axes[0].set_ylabel(wrapped(next(iter(algorithms.values()))[0].facts().get("data", name)))
        axes[0].legend()
        _gap(axes[-1], algorithms)
    return drawn


def curve(panel: Axes, runs: Sequence[Run], metric: str, by: str, band: bool = True, **style: Any) -> None:
    """Draw the mean over seeds in evaluated rounds that all seeds have reached, and a band from least to largest."""
    name, x = f"federated/{metric}", X[by]
    series = [[(x(row), row[name]) for row in run.history() if name in row] for run in runs]
    points = np.array([values[: min(map(len, series))] for values in series])  # seeds, evaluations, (x, y)
    if not points.size:
        return
    place, values = points[:, :, 0].mean(0), points[:, :, 1]
    (line,) = panel.plot(place, values.mean(0), **style)
    if band and len(values) > 1:
        panel.fill_between(place, values.min(0), values.max(0), color=line.get_color(), alpha=0.12, linewidth=0)


def _gap(panel: Axes, algorithms: dict[str, list[Run]]) -> None:
    labels = list(algorithms)
    found = gaps(algorithms[labels[0]], algorithms[labels[1]]) if len(labels) > 1 else {}
    if not found:
        panel.axis("off")
        return
    panel.semilogy(list(found), np.maximum(list(found.values()), 1e-18), "k.-")
    panel.set(title=f"max $|\\bar x - \\bar x'|$, {labels[0]} and {labels[1]}", xlabel="round", ylim=(1e-18, 1))
    panel.grid(alpha=0.3)


def spread(values: Sequence[float | None]) -> str:
    """Mean and standard deviation of the known values."""
    known = [value for value in values if value is not None]
    if not known:
        return ""
    return f"{statistics.mean(known):.4f}" + (f" +- {statistics.stdev(known):.4f}" if len(known) > 1 else "")


def wrapped(text: str, width: int = 40) -> str:
    return "\n".join(textwrap.wrap(text, width))
