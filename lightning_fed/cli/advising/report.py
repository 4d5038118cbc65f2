"""What ``lightning-fed advise`` has found, as text for people and as JSON for programs."""

from __future__ import annotations

import json
import math
import shlex
import textwrap
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from lightning_fed.cli.advising.settings import Settings, described
from lightning_fed.cli.advising.survey import Measured
from lightning_fed.theory.advice import Caution, Recommendation, Run
from lightning_fed.theory.guarantee import Guarantee

WIDTH = 100


@dataclass(frozen=True, eq=False)
class Finding:
    """Everything that the command has found.

    Args:
        run: the facts of the run.
        measured: what was measured of it.
        recommendation: the algorithm, with reasons.
        settings: the same by the keys of a config, with the learning rate.
        guaranteed: what the theorem asks for.
        present: what may go wrong with the settings of the config.
        advised: what may go wrong with the recommended settings.
        command: runs the recommendation.
    """

    run: Run
    measured: Measured
    recommendation: Recommendation
    settings: Settings
    guaranteed: Guarantee
    present: list[Caution]
    advised: list[Caution]
    command: list[str]

    @property
    def reasons(self) -> dict[str, str]:
        return {**self.recommendation.reasons, "lr": lr_reason(self.measured)}

    def changes(self) -> Iterator[tuple[str, Any, Any]]:
        """Name, present and recommended value of the settings that differ or have a reason."""
        old, new = described(self.settings.replaced), described(self.recommendation.algorithm)
        yield "algorithm", *(one["class_path"].split(".")[-1] for one in (old, new))
        for name, value in new["init_args"].items():
            before = old["init_args"].get(name)
            if name in self.reasons or (name in old["init_args"] and before != value):
                yield name, before, value
        yield "lr", self.measured.lr, self.measured.advised_lr


def lr_reason(measured: Measured) -> str:
    """Why this learning rate is recommended."""
    trial = measured.trial
    if trial is None:
        return "Not tried: the run's own."
    losses = ", ".join(f"{one.lr:g}: {one.loss:.3g}" for one in sorted(trial.tried, key=lambda one: -one.lr))
    what = (
        f"Training loss of {trial.clients} clients, {trial.start:.3g} at first, after {trial.rounds} visit(s) each, by"
        f" lr: {losses}."
    )
    if trial.conclusive:
        return f"{what} The lowest; the smaller of two that are alike."
    if trial.best.loss < trial.start:
        return f"{what} None is below {trial.constant:.3g}, which class frequencies alone give: the run's own is kept."
    return f"{what} None lowers it: the run's own is kept."


def as_text(found: Finding) -> str:
    """Recommendation first, then reasons, guarantees, warnings, and the command."""
    run, lines = found.run, []
    sizes = f"{min(run.examples.values())} to {max(run.examples.values())} samples"
    rounds = "unlimited" if math.isinf(run.rounds) else f"{run.rounds:g}"
    lines += [
        f"{len(run.examples)} clients of {sizes}, {run.per_round:g} per round, {rounds} rounds,"
        f" {run.local_steps} local steps, {found.measured.parameters} parameters",
        "",
        f"{'Recommended':14}{'now':>14}{'advised':>16}",
        *(f"  {name:12}{_short(old):>14}{_short(new):>16}" for name, old, new in found.changes()),
        "",
        "Why",
        *(line for name, reason in found.reasons.items() for line in _wrapped(f"{name}: {reason}")),
        "",
        "Guaranteed, slow",
        *_wrapped(guarantee_text(found)),
    ]
    for title, warnings in (("the present settings", found.present), ("the recommended settings", found.advised)):
        if warnings:
            lines += ["", f"Warnings about {title}"]
            lines += [line for one in warnings for line in _wrapped(f"{one.code}: {one.text}")]
    lines += ["", "To run it", f"  {shlex.join(found.command)}"]
    if found.settings.lr_key is None and found.measured.advised_lr != found.measured.lr:
        lines += _wrapped(f"and set the optimiser's lr to {found.measured.advised_lr:g} in configure_optimizers.")
    return "\n".join(lines)


def guarantee_text(found: Finding) -> str:
    """What the theorem asks for, beside the measured curvature."""
    curvature, bound = found.measured.curvature, found.guaranteed
    by = "power iteration" if curvature.method == "hessian" else "differences of gradients"
    return (
        f"FedADMM's theorem covers mean='all' with eta >= {bound.eta:.3g} (2.4 L and a tenth), lr = 1 / (L + eta) ="
        f" {bound.lr:.2g} and local problems solved ({bound.local_steps} full gradient steps shrink their gradient"
        f" tenfold). L = {curvature.L:.3g} is measured on {curvature.clients} clients by {by}"
        f" ({curvature.at_start:.3g} at the first model, {curvature.later:.3g} after {curvature.steps} gradient steps):"
        " a lower bound. Nothing is proved of the recommendation above."
    )


def as_json(found: Finding) -> str:
    """The same for programs."""
    measured, curvature, trial = found.measured, found.measured.curvature, found.measured.trial
    content = {
        "recommended": {**described(found.recommendation.algorithm), "key": found.settings.key},
        "lr": {"key": found.settings.lr_key, "now": measured.lr, "advised": measured.advised_lr},
        "settings": {name: {"now": old, "advised": new} for name, old, new in found.changes()},
        "reasons": found.reasons,
        "guaranteed": asdict(found.guaranteed),
        "warnings": [
            {"of": of, **asdict(one)}
            for of, some in (("present", found.present), ("recommended", found.advised))
            for one in some
        ],
        "command": found.command,
        "measured": {
            "of": len(found.run.examples),
            "samples": [min(found.run.examples.values()), max(found.run.examples.values())],
            "parameters": measured.parameters,
            "local_steps": measured.local_steps,
            "tau": measured.tau,
            "L": curvature.L,
            **asdict(curvature),
        },
        "trial": None if trial is None else {**asdict(trial), "conclusive": trial.conclusive},
        "now": described(found.run.algorithm),
    }
    return json.dumps(_finite(content), indent=2, default=str)


def _finite(value: Any) -> Any:
    """JSON has no NaN and no infinity: null."""
    if isinstance(value, dict):
        return {key: _finite(own) for key, own in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(own) for own in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _short(value: Any) -> str:
    if isinstance(value, dict):
        return str(value["class_path"]).split(".")[-1]
    return "-" if value is None else f"{value:.4g}" if isinstance(value, float) else str(value)


def _wrapped(text: str) -> list[str]:
    return textwrap.wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")
