"""What a tune does: rungs, numbers of trials, objective."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any, Literal

from lightning_fed.cli.tuning.space import Parameter
from lightning_fed.data.validation_share import VAL_FRACTION
from lightning_fed.trainer.model_choice import is_of_validation

#: The metric that trials are compared by, unless another is named.
DEFAULT = "federated/val_loss"

_UNITS = {"": 1, "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "kib": 2**10, "mib": 2**20, "gib": 2**30}


@dataclass(frozen=True)
class Budget:
    """The rungs of a trial, from the lowest to the whole budget.

    Args:
        unit: ``rounds``, or ``bytes`` that clients have received and sent.
        levels: rounds or bytes after which trials are compared.
    """

    unit: Literal["rounds", "bytes"]
    levels: tuple[int, ...]

    def names(self) -> str:
        """All rungs in words."""
        scale = 1 if self.unit == "rounds" else 1e6
        return f"{', '.join(f'{level / scale:g}' for level in self.levels)} {'rounds' if scale == 1 else 'MB'}"

    def name(self, level: int) -> str:
        return f"{level} round{'s' * (level != 1)}" if self.unit == "rounds" else f"{level / 1e6:g} MB"


@dataclass(frozen=True)
class Objective:
    """The metric that trials are compared by; never one of the test data."""

    name: str = DEFAULT
    maximize: bool = False

    def __post_init__(self) -> None:
        if "test" in self.name.lower():
            raise ValueError(
                f"The objective must not be a metric of the test data, got {self.name!r}: settings that they choose"
                " look better there than they are. Take federated/val_loss, another metric of validation data or"
                " federated/objective, and test the best settings once."
            )

    def rank(self, value: float) -> float:
        """Smaller is better."""
        return -value if self.maximize else value


@dataclass(frozen=True)
class Plan:
    """Everything that decides the result of a tune, besides the config.

    Args:
        space: what to search.
        trials: number of trials on the lowest rung.
        reduction: one of so many trials goes on to the next rung.
        budget: the rungs.
        objective: what to compare trials by.
        sampler: ``tpe`` or ``random``.
        seed: of the sampler.
        val_fraction: share of the training samples that clients hold out if the objective is a metric of validation
            data and the data have none.
    """

    space: tuple[Parameter, ...]
    trials: int
    reduction: int
    budget: Budget
    objective: Objective
    sampler: str = "tpe"
    seed: int = 0
    val_fraction: float = VAL_FRACTION

    def __post_init__(self) -> None:
        if not 0 <= self.val_fraction < 1:
            raise ValueError(f"--val-fraction must lie in [0, 1), got {self.val_fraction:g}. Try {VAL_FRACTION:g}.")

    @property
    def holds_out(self) -> float:
        """The share to hold out if the data have no validation split; 0 if trials are compared by other data."""
        return self.val_fraction if is_of_validation(self.objective.name) else 0.0

    def kept(self, rung: int) -> int:
        """Number of trials on a rung, if none fails."""
        return max(1, self.trials // int(self.reduction**rung))

    def facts(self) -> dict[str, Any]:
        """The plan in plain values, to compare with that of an earlier command."""
        return {
            "search": {parameter.key: parameter.spec for parameter in self.space},
            "trials": self.trials,
            "reduction": self.reduction,
            self.budget.unit: list(self.budget.levels),
            "objective": self.objective.name,
            "maximize": self.objective.maximize,
            "sampler": self.sampler,
            "seed": self.seed,
            "val_fraction": self.holds_out,
        }

    def describe(self) -> str:
        """Rungs, trials and cost in one line."""
        levels = self.budget.levels
        steps = [high - low for low, high in zip((0, *levels), levels, strict=False)]
        cost = sum(self.kept(rung) * step for rung, step in enumerate(steps))
        rungs = ", ".join(f"{self.kept(rung)} to {self.budget.name(level)}" for rung, level in enumerate(levels))
        whole = self.budget.name(self.trials * levels[-1])
        return f"{self.trials} trials: {rungs}; {self.budget.name(cost)} in total, in place of {whole}."


def rungs(least: int, most: int, reduction: int) -> tuple[int, ...]:
    """``least``, and ``reduction`` times as much each, up to ``most``.

    >>> rungs(5, 40, 2), rungs(3, 40, 3)
    ((5, 10, 20, 40), (3, 9, 27, 40))
    """
    found = [least]
    while found[-1] * reduction < most:
        found.append(found[-1] * reduction)
    return (*found, most) if found[-1] < most else (most,)


def parse_bytes(text: str) -> int:
    """A number of bytes.

    >>> parse_bytes("20MB"), parse_bytes("1.5 kB"), parse_bytes("1KiB")
    (20000000, 1500, 1024)
    """
    found = re.fullmatch(r"(\d+(?:\.\d*)?)\s*([a-zA-Z]*)", text.strip())
    if found is None or found[2].lower() not in _UNITS or not float(found[1]):
        raise ValueError(f"must be a number of bytes such as 20MB, 500kB or 1GiB, got {text!r}")
    return max(1, round(float(found[1]) * _UNITS[found[2].lower()]))
