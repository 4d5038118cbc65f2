"""Compare all algorithms on the same data, model and local work, in a table and a figure."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from lightning_fed.callbacks.curves import megabytes
from lightning_fed.cli.experiments.report import CURVES, MEGABYTES, ROUND, curve, spread, wrapped
from lightning_fed.cli.experiments.run import CLIENTS_PER_ROUND, Row, Run
from lightning_fed.cli.experiments.settings import CLIENTS

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Every algorithm with its defaults, and further hyper-parameters to try; the table also has the best by train loss.
#: Left out are equal runs: FedDRII (equal to FedDR), and other steps of FedDR (equal to FedADMM).
FAMILY: dict[str, tuple[str, ...]] = {
    "FedADMM": ("FedADMM:eta=0.1",),
    "FedADMM:eta=auto,mean=active": ("FedADMM:eta=auto,mean=active,weights=samples",),
    "FedADMM:eta=auto,mean=seen": (),
    "FedPrimalDual:weights=samples": ("FedPrimalDual", "FedPrimalDual:b=5", "FedPrimalDual:weights=samples,b=5"),
    "FedADMM:start=local": ("FedADMM:start=local,eta=0.1",),  # as in the reproduced experiments
    "FedDR": (),
    "FedDRII:mode=upload_first": ("FedDRII:mode=upload_first,eta_hat=10",),
    "FedDyn": ("FedDyn:alpha=0.1", "FedDyn:alpha=0.1,weights=samples"),
    "FedAvg": ("FedAvg:weights=uniform",),
    "FedProx": ("FedProx:mu=0.01", "FedProx:mu=1"),
    "FedAvgM": ("FedAvgM:beta=0.5",),
    "FedAdam": ("FedAdam:server_lr=0.03",),
    "FedYogi": ("FedYogi:server_lr=0.03",),
    "FedAdagrad": ("FedAdagrad:server_lr=0.3",),
    "FedNova": (),  # equal to FedAvg here, because all clients take as many steps
    "Scaffold": ("Scaffold:weights=samples",),
    "Scaffold:vectors=1": (),
    "FedMid": (),
    "FedDualAvg": (),
    "FedPAQ": (),
    "FedADMM+Quantize:levels=64": (),
    "FedADMM+TopK:k=228": (),  # a tenth of the perceptron's parameters
    "FedPD": ("FedPD:eta_hat=10",),
    "ParallelDRS": ("ParallelDRS:eta_hat=10",),
    "FedSplit": ("FedSplit:s=10",),
    "FedLin": (),
}

#: On writers, where a run takes half an hour: the methods that a user chooses between.
ON_WRITERS: dict[str, tuple[str, ...]] = {
    "FedADMM:eta=auto,mean=active": (),
    "FedPrimalDual:weights=samples": (),
    "FedAvg": (),
    "FedADMM:start=local": (),
    "FedDyn:alpha=0.1": (),
    "Scaffold": (),
}

#: The methods that figures of many curves show in colour.
HIGHLIGHTED = ("FedADMM:eta=auto,mean=active", "FedADMM", "FedAvg", "Scaffold", "FedDyn")
#: Colours of these, which colour-blind readers can tell apart, and the colour of all others.
COLOURS = ("#0072B2", "#56B4E9", "#D55E00", "#009E73", "#CC79A7", "#E69F00")
GREY = "0.8"

#: Test accuracies whose first rounds and bytes the table tells.
LEVELS = (0.6, 0.7, 0.8)

#: First rounds, which are always evaluated, and the rounds of the table.
FIRST_ROUNDS, MARKS = (1, 2, 3), (10, 50, 100)

Algorithms = Mapping[str, Sequence[Run]]


def labels(family: Mapping[str, Sequence[str]]) -> list[str]:
    """Labels of all runs."""
    return [label for own, others in family.items() for label in (own, *others)]


def marks(rounds: int) -> list[int]:
    """The table's rounds in a comparison of ``rounds`` rounds."""
    return [mark for mark in MARKS if mark < rounds] + [rounds]


def shown(algorithms: Algorithms, family: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Labels of the table's rows by row name: the defaults, and the best of several hyper-parameters."""
    found = {}
    for own, others in family.items():
        tried = [label for label in (own, *others) if label in algorithms]
        best = min(tried, key=lambda label: _final_loss(algorithms[label]), default=None)
        if own in tried and (own != best or len(tried) == 1):
            found[own] = own
        if best is not None and len(tried) > 1:
            found[f"{best} (best of {len(tried)})"] = best
    return found


def markdown(algorithms: Algorithms, family: Mapping[str, Sequence[str]]) -> str:
    """One line per algorithm: loss and accuracy after some rounds, accuracy at equal bytes, and total costs."""
    rows = shown(algorithms, family)
    rounds = next(iter(algorithms.values()))[0].rounds
    budget = min((total for label in rows.values() if (total := _sent(algorithms[label]))), default=0.0)
    header = ["algorithm", "clients"]
    header += [f"{what}, round {mark}" for what in ("train loss", "test accuracy") for mark in marks(rounds)]
    header += [f"rounds (MB) to {level:.0%}" for level in LEVELS]
    header += [f"test accuracy after {budget:.3g} MB", "MB", "local steps", "full gradients"]
    lines = [header, ["---"] * len(header)]
    for name, label in rows.items():
        runs = algorithms[label]
        line = [f"`{name}`" if name == label else f"`{label}`{name.removeprefix(label)}"]
        line += ["all" if runs[0].cohort is None else f"{CLIENTS_PER_ROUND} of {CLIENTS}"]
        line += [_after(runs, metric, mark) for metric in ("train_loss", "test_accuracy") for mark in marks(rounds)]
        line += [_first_above(runs, level) for level in LEVELS]
        line += [_at_budget(runs, budget), _number(_sent(runs))]
        lines.append(line + [_number(_last(runs, f"federated/{what}")) for what in ("local_steps", "full_gradients")])
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def highlighted(algorithms: Algorithms, family: Mapping[str, Sequence[str]]) -> dict[str, str]:
    """Colours of the few curves that a reader compares, by label: all if they are few, else :data:`HIGHLIGHTED`.

    Of several hyper-parameters the best by train loss is taken; the best curve of all is among them.
    """
    labels = list(shown(algorithms, family).values())
    if len(labels) > len(COLOURS):
        tried = [[label for label in (own, *family.get(own, ())) if label in labels] for own in HIGHLIGHTED]
        chosen = [min(found, key=lambda label: _final_loss(algorithms[label])) for found in tried if found]
        best = min(labels, key=lambda label: _final_loss(algorithms[label]))
        labels = list(dict.fromkeys([*chosen[: len(COLOURS) - 1], best]))
    return dict(zip(labels, COLOURS, strict=False))


def figure(settings: Mapping[str, Algorithms], family: Mapping[str, Sequence[str]]) -> Figure:
    """One row per setting: test accuracy by round and by bytes, a few algorithms in colour and all others in grey."""
    from matplotlib.figure import Figure

    drawn = Figure(figsize=(15, 4.6 * len(settings)), layout="constrained")
    grid = drawn.subplots(len(settings), 2, squeeze=False)
    for line, (name, algorithms) in zip(grid, settings.items(), strict=True):
        described = wrapped(next(iter(algorithms.values()))[0].facts().get("data", name), 80)
        for panel, by in zip(line, (ROUND, MEGABYTES), strict=True):
            _draw_panel(panel, algorithms, family, by)
            panel.set_title(described)
        line[1].set_xscale("log")
        line[1].legend(loc="center left", bbox_to_anchor=(1.0, 0.5), title=_dashes(algorithms))
    return drawn


def _draw_panel(panel: Axes, algorithms: Algorithms, family: Mapping[str, Sequence[str]], by: str) -> None:
    colours = highlighted(algorithms, family)
    grey = [label for label in shown(algorithms, family).values() if label not in colours]
    for label in [*colours, *grey]:
        style: dict[str, Any] = {"color": GREY, "linewidth": 1, "zorder": 1}
        if label in colours:
            style = {"color": colours[label], "linewidth": 2.2, "zorder": 3, "label": label}
        elif label == grey[0]:
            style["label"] = f"{len(grey)} others"
        runs = algorithms[label]
        curve(panel, runs, "test_accuracy", by, band=False, linestyle="--" if runs[0].cohort is None else "-", **style)
    panel.set(xlabel=by, ylabel=CURVES["test_accuracy"])
    panel.grid(alpha=0.3)


def _dashes(algorithms: Algorithms) -> str | None:
    everybody = any(runs[0].cohort is None for runs in algorithms.values())
    return "dashed: all clients in every round" if everybody else None


def _value(run: Run, metric: str, round: int) -> float:
    """A metric after a round; not finite if the run has diverged, or has not reached the round."""
    history = run.history()
    return history[round - 1].get(f"federated/{metric}", math.nan) if round <= len(history) else math.nan


def _after(runs: Sequence[Run], metric: str, round: int) -> str:
    found = [_value(run, metric, round) for run in runs]
    missing = [run for run, value in zip(runs, found, strict=True) if not math.isfinite(value)]
    if any(run.done for run in missing):
        return "diverged" if len(runs) == 1 else f"diverged ({len(missing)} of {len(runs)})"
    return spread([value for value in found if math.isfinite(value)]) or "-"


def _final_loss(runs: Sequence[Run]) -> float:
    found = [_value(run, "train_loss", run.rounds) for run in runs]
    return statistics.mean(found) if all(map(math.isfinite, found)) else math.inf


def _last(runs: Sequence[Run], name: str) -> float | None:
    """The mean over seeds of a final total; None unless all runs are complete."""
    ends = [run.history()[-1].get(name, math.nan) for run in runs if len(run.history()) == run.rounds]
    return statistics.mean(ends) if len(ends) == len(runs) and all(map(math.isfinite, ends)) else None


def _sent(runs: Sequence[Run]) -> float | None:
    down, up = (_last(runs, f"federated/{name}") for name in ("bytes_down", "bytes_up"))
    return None if down is None or up is None else (down + up) / 1e6


def _first_above(runs: Sequence[Run], level: float) -> str:
    """First evaluated round whose mean test accuracy over seeds is at least ``level``, and megabytes until then."""
    histories = [run.history() for run in runs]
    for rows in zip(*histories, strict=False):
        accuracies = [row.get("federated/test_accuracy", math.nan) for row in rows]
        if statistics.mean(accuracies) >= level:  # never, where a value is missing
            return f"{rows[0]['round'] + 1:.0f} ({_number(statistics.mean(map(megabytes, rows)))})"
    return "-"


def _at_budget(runs: Sequence[Run], budget: float) -> str:
    """Test accuracy after ``budget`` megabytes, interpolated linearly between evaluations."""
    if _sent(runs) is None:
        return "-"
    curves = [_accuracy_by_megabytes(run.history()) for run in runs]
    if any(not sent or sent[0] > budget for sent, _ in curves):
        return "-"
    return spread([float(np.interp(budget, sent, accuracy)) for sent, accuracy in curves])


def _accuracy_by_megabytes(history: Sequence[Row]) -> tuple[list[float], list[float]]:
    rows = [row for row in history if "federated/test_accuracy" in row]
    return [megabytes(row) for row in rows], [row["federated/test_accuracy"] for row in rows]


def _number(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:,.0f}" if value >= 100 or value == int(value) else f"{value:.3g}"
