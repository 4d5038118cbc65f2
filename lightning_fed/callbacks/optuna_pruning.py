from __future__ import annotations

import math
from importlib import import_module
from typing import TYPE_CHECKING, Any

from lightning_fed.callbacks.evaluation import OBJECTIVE
from lightning_fed.engines.failed_clients import is_divergence
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import FederatedCallback

if TYPE_CHECKING:
    from optuna import Trial


def import_optuna(who: str) -> Any:
    """Import Optuna, which is an optional requirement, or say how ``who`` gets it."""
    try:
        return import_module("optuna")
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(f'{who} needs Optuna. Install it: pip install "lightning-fed[optuna]"') from error


class OptunaPruning(FederatedCallback):
    """Reports a metric to an Optuna trial after every round that logs it, and ends a trial that Optuna prunes.

    The step of a report is the number of rounds done. ``optuna.TrialPruned`` leaves ``Trainer.fit`` after the round is
    committed; a trial also counts as pruned, with the reason, if a client diverges or the metric is not finite.

    Args:
        trial: the trial that ``study.optimize`` gives to your objective, or ``study.ask()``.
        monitor: name of a metric that the fit logs, in training or validation.

    >>> import optuna
    >>> OptunaPruning(optuna.create_study().ask(), "federated/objective").monitor
    'federated/objective'
    """

    reads_module = False

    def __init__(self, trial: Trial, monitor: str = OBJECTIVE) -> None:
        self._pruned: type[Exception] = import_optuna("OptunaPruning").TrialPruned
        self.trial, self.monitor = trial, monitor
        self._reports = 0

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._reports = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        row = trainer.fit_loop.server.history[-1]
        if self.monitor not in row:  # this round was not evaluated
            return
        done, value = int(row["round"]) + 1, row[self.monitor]
        if not math.isfinite(value):
            raise self._pruned(f"{self.monitor} is {value} after {done} rounds.")
        self._reports += 1
        self.trial.report(value, step=done)
        if self.trial.should_prune():
            raise self._pruned(f"{self.monitor} is {value:g} after {done} rounds, which Optuna's pruner refuses.")

    def on_round_error(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, error: Exception) -> None:
        if is_divergence(error):
            raise self._pruned(str(error)) from error

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self._reports:
            known = ", ".join(sorted(trainer.callback_metrics)) or "none"
            raise ValueError(f"OptunaPruning.monitor: no round logged {self.monitor!r}. Logged metrics are: {known}.")
