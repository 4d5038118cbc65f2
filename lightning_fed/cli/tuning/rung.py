"""The callback that stops a trial at a rung, so that its next leg continues bit for bit."""

from __future__ import annotations

import math
from datetime import timedelta
from pathlib import Path
from typing import Any

from lightning_fed.callbacks import ClientEvaluation, FederatedCallback
from lightning_fed.cli.tuning.journal import Leg, State
from lightning_fed.cli.tuning.plan import Budget, Objective
from lightning_fed.lightning import Checkpoint, ModelCheckpoint, pl, validation_metrics_of
from lightning_fed.server import FederatedServer

#: Time between the checkpoints of a long leg.
EVERY = timedelta(minutes=5)


class Rung(FederatedCallback):
    """Notes the objective of every round, and stops the fit and saves a checkpoint after the round that reaches a rung.

    The trainer has the limits of the whole budget from the start, so that schedules and evaluations do not depend on
    the rung.
    """

    reads_module = False

    def __init__(self, objective: Objective, budget: Budget, level: int, checkpoint: Path) -> None:
        self.objective, self.budget, self.level, self.checkpoint = objective, budget, level, checkpoint
        self.curve: list[tuple[int, int, float]] = []
        self.rounds = self.sent = 0
        self.stopped = False  # by another callback, such as early stopping
        self.diverged = ""
        self.known: set[str] = set()

    def state_dict(self) -> dict[str, Any]:
        return {"curve": self.curve, "rounds": self.rounds, "sent": self.sent, "stopped": self.stopped}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.curve = [tuple(point) for point in state_dict["curve"]]
        self.rounds, self.sent, self.stopped = (state_dict[name] for name in ("rounds", "sent", "stopped"))

    @property
    def reached(self) -> bool:
        return (self.rounds if self.budget.unit == "rounds" else self.sent) >= self.level

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.stopped or self.reached:  # killed between the checkpoint of the rung and its entry in the journal
            self._stop(trainer)

    def on_validation_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        validated = validation_metrics_of(trainer)
        if self.objective.name in validated and not trainer.datamodule.has_split("val"):
            raise TestDataError(
                f"The objective {self.objective.name} would be measured on the test data: the data have no validation"
                " split, and validation then takes the test split. Hold out validation data, such as by"
                " --data.val_fraction=0.1, or take federated/val_loss or federated/objective."
            )

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        row = trainer.fit_loop.server.history[-1]
        self.known |= row.keys()
        self.rounds = int(row["round"]) + 1
        self.sent = int(row["federated/bytes_down"] + row["federated/bytes_up"])
        if (value := row.get(self.objective.name)) is not None:
            if math.isfinite(value):
                self.curve.append((self.rounds, self.sent, value))
            else:
                self.diverged = f"{self.objective.name} is {value} after {self.rounds} rounds."

    def decide(self, trainer: pl.Trainer) -> None:
        """Stop at the rung, and note whether the fit would have ended here anyway."""
        self.stopped = trainer.should_stop and self.rounds >= (trainer.min_epochs or 0)
        if self.diverged or self.reached:
            self._stop(trainer)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if not self.diverged:
            trainer.save_checkpoint(self.checkpoint)

    def leg(self) -> Leg:
        """The result, after a fit that returned."""
        if self.diverged:
            return self.diverging(self.diverged)
        if not self.curve:
            raise UnknownMetricError(self._unknown())
        state: State = "reached" if self.reached and not self.stopped else "ended"
        return Leg(state, self.rounds, self.sent, self.curve[-1][2], curve=tuple(self.curve))

    def diverging(self, why: str) -> Leg:
        return Leg("diverged", self.rounds, self.sent, why=why, curve=tuple(self.curve))

    def _unknown(self) -> str:
        names = sorted(name for name in self.known - {"round"} if "test" not in name)
        return (
            f"{self.objective.name} was not logged in the first {self.rounds} rounds, so trials cannot be compared."
            f" Metrics that were: {', '.join(names)}. Name one as --objective, or evaluate more often."
        )

    def _stop(self, trainer: pl.Trainer) -> None:
        trainer.fit_loop.min_epochs = trainer.fit_loop.epoch_loop.min_steps = None  # they would delay the stop
        trainer.should_stop = True


class LegCheckpoint(ModelCheckpoint):
    """Saves during long legs, in the file that the end of a leg writes too; lets the rung decide after each round.

    Lightning calls checkpoints after all other callbacks, early stopping included.
    """

    def __init__(self, rung: Rung) -> None:
        folder, name = rung.checkpoint.parent, rung.checkpoint.stem
        super().__init__(folder, filename=name, train_time_interval=EVERY, enable_version_counter=False)
        self.rung = rung

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rung.decide(trainer)
        super().on_train_epoch_end(trainer, pl_module)


class UnknownMetricError(ValueError):
    """The objective is not a metric of the run."""


class TestDataError(ValueError):
    """The objective is a metric of the test data under another name."""

    __test__ = False  # no class of tests


def evaluate_at_rungs(trainer: pl.Trainer, budget: Budget) -> None:
    """Have the objective evaluated in the last round of every rung, however rarely the config does."""
    if budget.unit == "bytes":
        return  # which rounds these are is not known before
    for callback in trainer.callbacks:
        if isinstance(callback, ClientEvaluation):
            callback.also_after = (*callback.also_after, *budget.levels)
            return
    server = next(callback for callback in trainer.callbacks if isinstance(callback, FederatedServer))
    evaluation = ClientEvaluation(server.evaluate_every or budget.levels[-1], also_after=budget.levels)
    first = next((i for i, c in enumerate(trainer.callbacks) if isinstance(c, (Rung, Checkpoint))), 0)
    trainer.callbacks.insert(first, evaluation)
