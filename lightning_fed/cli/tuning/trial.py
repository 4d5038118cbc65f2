"""Run one leg of a trial: the fit of the config with the trial's settings, up to a rung."""

from __future__ import annotations

import gc
import warnings
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from pydoc import locate
from typing import Any

import wandb
from jsonargparse import Namespace

from lightning_fed.cli.holding_out import HoldOut
from lightning_fed.cli.main import build
from lightning_fed.cli.refusals import one_line, refusal
from lightning_fed.cli.tuning.config import ConfigCLI
from lightning_fed.cli.tuning.journal import Journal, Leg, Trial
from lightning_fed.cli.tuning.plan import Plan
from lightning_fed.cli.tuning.rung import LegCheckpoint, Rung, TestDataError, evaluate_at_rungs
from lightning_fed.cli.tuning.space import arguments
from lightning_fed.engines.failed_clients import is_divergence
from lightning_fed.lightning import Checkpoint, WandbLogger
from lightning_fed.store.lease import LeaseError

#: Replaces the config's settings: a trial has its own checkpoint, and tells of itself when it reaches a rung.
QUIET: dict[str, Any] = {
    "barebones": False,
    "enable_checkpointing": True,
    "enable_model_summary": False,
    "enable_progress_bar": False,
    "fast_dev_run": False,
    "profiler": None,
}

#: Errors that are no refusal of a trial's settings.
OTHERS = (OSError, LeaseError, TestDataError)


@dataclass(frozen=True)
class Surroundings:
    """Where a trial runs, and under which name it is logged."""

    folder: Path
    name: str
    group: str


class TrialCLI(ConfigCLI):
    """Builds the objects of ``fit``, with the trial's folder, logger and checkpoint in place of the config's."""

    def __init__(self, *args: Any, surroundings: Surroundings, **kwargs: Any) -> None:
        self.surroundings = surroundings
        super().__init__(*args, **kwargs)

    def before_instantiate_classes(self) -> None:
        trainer, server = self.config.trainer, self.config.federated
        for name, value in QUIET.items():
            trainer[name] = value
        trainer.logger = logger(trainer.logger, self.surroundings)
        if server.store_dir is not None:  # every trial has memories of its own
            server.store_dir = str(self.surroundings.folder / "checkpoint" / "client_memory")

    def build_classes(self) -> None:
        """Build everything, and drop the checkpoints of the config, which nobody would resume from."""
        super(ConfigCLI, self).build_classes()
        callbacks = self.trainer.callbacks
        callbacks[:] = [c for c in callbacks if isinstance(c, LegCheckpoint) or not isinstance(c, Checkpoint)]


def logger(given: Any, surroundings: Surroundings) -> Any:
    """The W&B logger of the config with the name and the group of the trial; False stays False."""
    if given is False:
        return False
    found = next((each for each in (given if isinstance(given, list) else [given]) if _is_wandb(each)), None)
    path = "lightning_fed.tracking.AutoWandbLogger" if found is None else found.class_path
    options = {} if found is None else {**vars(found.get("init_args", Namespace()))}  # type: ignore[no-untyped-call]
    extra = {} if found is None else dict(found.get("dict_kwargs") or {})
    options |= {"name": surroundings.name, "save_dir": str(surroundings.folder)}
    extra |= {"group": surroundings.group, "job_type": "tune"}
    made = Namespace(class_path=path, init_args=Namespace(**options), dict_kwargs=extra)  # type: ignore[no-untyped-call]
    return made


def _is_wandb(given: Any) -> bool:
    kind = locate(given.class_path) if isinstance(given, Namespace) else None
    return isinstance(kind, type) and issubclass(kind, WandbLogger)


class Runner:
    """Runs legs of trials.

    Args:
        plan: what to do.
        args: arguments of ``fit`` that all trials share.
        journal: where trials and their checkpoints are.
        name: of the tune, which is W&B's group.
    """

    def __init__(self, plan: Plan, args: Sequence[str], journal: Journal, name: str) -> None:
        self.plan, self.args, self.journal, self.name = plan, list(args), journal, name
        self.told: set[str] = set()

    def go(self, trial: Trial) -> Leg:
        """Run a trial's next leg; resumes from its checkpoint, wherever that is."""
        rung = len(trial.legs)
        if trial.legs and trial.last.state == "ended":
            return trial.last
        level = self.plan.budget.levels[rung]
        watch = Rung(self.plan.objective, self.plan.budget, level, self.journal.checkpoint_of(trial.number))
        try:
            with warnings.catch_warnings():
                self._fit(trial, watch)
        except Exception as error:  # one that does not come from the trial's settings is raised again
            return self._after(error, watch)
        finally:
            wandb.finish()
            gc.collect()  # closes memories of clients on disk, which the next leg opens
        return watch.leg()

    def _fit(self, trial: Trial, watch: Rung) -> None:
        cli = self._built(trial, watch)
        evaluate_at_rungs(cli.trainer, self.plan.budget)
        self._hold_out(cli.trainer.callbacks)
        saved = watch.checkpoint if watch.checkpoint.exists() else None
        cli.trainer.fit(cli.model, datamodule=cli.datamodule, ckpt_path=saved)

    def _hold_out(self, callbacks: list[Any]) -> None:
        """Have validation data held out if the tune, or a callback of the config, chooses by them."""
        share = self.plan.holds_out
        if share and not any(isinstance(callback, HoldOut) for callback in callbacks):
            callbacks.insert(0, HoldOut(f"tune compares trials by {self.plan.objective.name!r}", share))
        for callback in callbacks:
            if isinstance(callback, HoldOut):
                callback.fraction, callback.tell = share or callback.fraction, self._tell_once

    def _tell_once(self, line: str) -> None:
        if line not in self.told:
            self.told.add(line)
            print(line, flush=True)

    def _built(self, trial: Trial, watch: Rung) -> Any:
        folder = self.journal.folder_of(trial.number)
        args = [*self.args, f"--trainer.default_root_dir={folder}", *arguments(trial.settings)]
        return build(
            args,
            cli=TrialCLI,
            run=False,
            surroundings=Surroundings(folder, f"{self.name} trial {trial.number}", self.name),
            trainer_defaults={"callbacks": [watch, LegCheckpoint(watch)]},
        )

    def _after(self, error: Exception, watch: Rung) -> Leg:
        if is_divergence(error):
            return watch.diverging(one_line(str(error)))
        why = str(error) if isinstance(error, ArgumentError) else refusal(error)
        if why is None or isinstance(error, OTHERS):
            raise error
        return Leg("failed", why=one_line(why))
