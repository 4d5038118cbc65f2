"""The end of a tune: table, CSV, figure, and the best settings as a config and as a command."""

from __future__ import annotations

import csv
import os
import shlex
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from lightning_fed.cli.tuning.config import Config
from lightning_fed.cli.tuning.halving import ranking, short
from lightning_fed.cli.tuning.journal import Trial
from lightning_fed.cli.tuning.plan import Plan
from lightning_fed.cli.tuning.space import arguments, labels

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Trials that the legend names.
NAMED = 6


def columns(plan: Plan) -> list[str]:
    names = labels([parameter.key for parameter in plan.space])
    return ["rank", "trial", *names.values(), "rung", "rounds", "megabytes", plan.objective.name, "state", "why"]


def rows(trials: Sequence[Trial], plan: Plan) -> list[list[Any]]:
    """One row per trial, the best first."""
    found = []
    for rank, trial in enumerate(ranking(trials, plan), start=1):
        settings = [trial.settings[parameter.key] for parameter in plan.space]
        leg = trial.last
        facts = [len(trial.legs), leg.rounds, leg.sent / 1e6, leg.value, state(trial, plan), leg.why]
        found.append([rank, trial.number, *settings, *facts])
    return found


def state(trial: Trial, plan: Plan) -> str:
    """What became of a trial, in a word."""
    if trial.alive:
        return "finished" if len(trial.legs) == len(plan.budget.levels) else "eliminated"
    return trial.last.state


def table(trials: Sequence[Trial], plan: Plan) -> str:
    """The rows as text."""
    cells = [columns(plan), *([_cell(value) for value in row] for row in rows(trials, plan))]
    widths = [max(map(len, column)) for column in zip(*(line[:-1] for line in cells), strict=True)]
    lines = ["  ".join(cell.rjust(width) for cell, width in zip(line[:-1], widths, strict=True)) for line in cells]
    whys = ["", *(textwrap.shorten(line[-1], 100) for line in cells[1:])]
    return "\n".join(f"{line}  {why}".rstrip() for line, why in zip(lines, whys, strict=True))


def _cell(value: Any) -> str:
    return "" if value is None else short(value)


def write_csv(trials: Sequence[Trial], plan: Plan, path: Path) -> None:
    """The rows in full precision, with the full keys of the config."""
    header = columns(plan)
    header[2 : 2 + len(plan.space)] = [parameter.key for parameter in plan.space]
    with path.open("w", newline="", encoding="utf-8") as file:
        csv.writer(file).writerows([header, *rows(trials, plan)])


def best_config(best: Config, base: Config | None, path: Path | None, folder: Path) -> str:
    """YAML, for a file in ``folder``, of what ``best`` changes in ``base``, the config that the file ``path`` gives.

    Without a base, which a file that is completed by arguments is none, everything is in it.
    """
    if base is None or path is None:
        return yaml.safe_dump(best, sort_keys=False)
    return yaml.safe_dump({"base": os.path.relpath(path, folder), **changes(base, best)}, sort_keys=False)


def changes(base: Config, own: Config) -> Config:
    """The smallest config that makes ``own`` of ``base``; an object of another class is given as a whole.

    >>> changes({"a": 1, "b": {"c": 2, "d": 3}}, {"a": 1, "b": {"c": 4, "d": 3}})
    {'b': {'c': 4}}
    """
    found: Config = {}
    for key, value in own.items():
        old = base.get(key)
        if key in base and old == value:
            continue
        inner = isinstance(old, dict) and isinstance(value, dict) and old.get("class_path") == value.get("class_path")
        found[key] = changes(old, value) if inner else value  # type: ignore[arg-type]
    return found


def command(args: Sequence[str], trial: Trial) -> str:
    """The command that runs ``fit`` with a trial's settings."""
    return f"lightning-fed fit {shlex.join([*args, *arguments(trial.settings)])}"


def figure(trials: Sequence[Trial], plan: Plan, title: str) -> Figure:
    """The objective of all trials, by rounds or by megabytes; eliminated trials are pale."""
    from matplotlib.figure import Figure

    names, ranked = labels([parameter.key for parameter in plan.space]), ranking(trials, plan)
    drawn = Figure(figsize=(8.5, 5), layout="constrained")
    axes = drawn.subplots()
    for rank, trial in reversed(list(enumerate(ranked))):  # the best on top
        settings = ", ".join(f"{names[key]}={short(value)}" for key, value in trial.settings.items())
        label = f"{rank + 1}. trial {trial.number}: {settings}" if rank < NAMED and trial.alive else None
        _curve(axes, trial, plan, label)
    by_rounds = plan.budget.unit == "rounds"
    axes.locator_params("x", integer=by_rounds)
    for level in plan.budget.levels[:-1]:
        axes.axvline(level if by_rounds else level / 1e6, color="0.8", linestyle=":", zorder=0)
    axes.set(xlabel="round" if by_rounds else "megabytes received and sent", ylabel=plan.objective.name)
    values = [value for trial in trials if trial.legs for _, _, value in trial.last.curve]
    if values and min(values) > 0 and max(values) > 20 * min(values):
        axes.set_yscale("log")
    axes.grid(alpha=0.3)
    handles, texts = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], texts[::-1], fontsize="small")
    drawn.suptitle(title, fontsize="medium")
    return drawn


def _curve(axes: Axes, trial: Trial, plan: Plan, label: str | None) -> None:
    if not trial.last.curve:
        return
    rounds, sent, values = zip(*trial.last.curve, strict=True)
    x = rounds if plan.budget.unit == "rounds" else [each / 1e6 for each in sent]
    finished = state(trial, plan) == "finished"
    (line,) = axes.plot(x, values, label=label, alpha=1.0 if finished else 0.4, linewidth=1.6 if finished else 1.0)
    ended = "x" if not trial.alive else "o"  # a cross where a trial diverged
    axes.plot(x[-1:], values[-1:], ended, color=line.get_color(), alpha=1.0 if finished else 0.5, markersize=4)
