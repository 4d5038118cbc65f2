"""Best values of metrics in the summary of a W&B run, where it is known which side is better."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import partial
from typing import Any

from lightning_fed.core.direction import direction
from lightning_fed.lightning import Logger, WandbLogger, wandb_axis


class BestValues:
    """Has W&B keep the last and the best value of each metric in a run's summary: ``{"last": 0.8, "max": 0.9}``.

    A metric whose better side is not known, by a statement or by its name, keeps W&B's own summary, the last value.
    """

    def __init__(self) -> None:
        self._sides: dict[str, bool | None] = {}  # as stated by those who know more than a name
        self._run: Any = None
        self._seen: set[str] = set()

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "_run": None, "_seen": set()}  # a run cannot be pickled

    def state(self, sides: Mapping[str, bool | None]) -> None:
        """Say of metrics whether higher values are better; None if nobody knows."""
        self._sides.update(sides)

    def define(self, logger: WandbLogger, names: Iterable[str]) -> None:
        """Define metrics that are about to be logged for the first time in the logger's run."""
        run = logger.experiment
        if run is not self._run:  # a run that is continued is told again
            self._run, self._seen = run, set()
        prefix, axis = wandb_axis(logger)
        for name in [name for name in names if name not in self._seen]:
            self._seen.add(name)
            side = self._sides.get(name, direction(name))
            if side is not None:
                best = "max" if side else "min"
                run.define_metric(f"{prefix}{name}", step_metric=axis, step_sync=True, summary=f"last,{best}")


def keep_best(loggers: Iterable[Logger]) -> None:
    """Have stock W&B loggers define best values of what they log, as ``AutoWandbLogger`` does by itself."""
    for logger in loggers:
        if isinstance(logger, WandbLogger) and not hasattr(logger, "best_values"):
            vars(logger)["best_values"] = BestValues()
            vars(logger)["log_metrics"] = partial(_define_and_log, logger, logger.log_metrics)


def _define_and_log(
    logger: Any, log: Callable[..., None], metrics: Mapping[str, float], step: int | None = None
) -> None:
    logger.best_values.define(logger, metrics)
    log(metrics, step)


def state_sides(loggers: Iterable[Logger], sides: Mapping[str, bool | None]) -> None:
    """Tell W&B loggers of metrics whether higher values are better, before they are logged."""
    for logger in loggers:
        best = getattr(logger, "best_values", None)
        if isinstance(best, BestValues):  # the logger of fast_dev_run has every attribute
            best.state(sides)
