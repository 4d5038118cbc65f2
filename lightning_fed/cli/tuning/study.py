"""Optuna's part: suggest settings, and keep a study on disk that Optuna's tools can read."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lightning_fed.callbacks.optuna_pruning import import_optuna
from lightning_fed.cli.tuning.journal import Leg, Trial
from lightning_fed.cli.tuning.plan import Plan
from lightning_fed.cli.tuning.space import Value
from lightning_fed.core.randomness import derive_seed


def suggest(plan: Plan, number: int, done: Sequence[Trial]) -> dict[str, Value]:
    """The settings of a trial: a function of the plan, its number, and the first rung of the trials before it.

    The sampler is made anew for each trial, so that a tune that was killed suggests what it would have suggested.
    """
    optuna = _optuna()
    seed = derive_seed(plan.seed, number, "tune") % 2**32
    samplers = {"tpe": optuna.samplers.TPESampler, "random": optuna.samplers.RandomSampler}
    study = optuna.create_study(direction=_direction(plan), sampler=samplers[plan.sampler](seed=seed))
    study.add_trials([_first_rung(optuna, plan, trial) for trial in done])
    return dict(study.ask(_distributions(plan)).params)


def _first_rung(optuna: Any, plan: Plan, trial: Trial) -> Any:
    """A trial as it was after its first rung; a sampler takes a pruned trial without a value for the worst."""
    leg, states = trial.legs[0], optuna.trial.TrialState
    state = {"failed": states.FAIL, "diverged": states.PRUNED}.get(leg.state, states.COMPLETE)
    return optuna.trial.create_trial(
        state=state, value=leg.value, params=trial.settings, distributions=_distributions(plan)
    )


class StudyFile:
    """A study in Optuna's journal format, written anew when a tune begins or resumes.

    A leg is an intermediate value at its number of rounds; a trial that does not go on is pruned.
    """

    def __init__(self, plan: Plan, path: Path, name: str) -> None:
        optuna = _optuna()
        journal = optuna.storages.journal
        for old in (path, path.with_name(f"{path.name}.lock")):
            old.unlink(missing_ok=True)
        storage = optuna.storages.JournalStorage(journal.JournalFileBackend(str(path)))
        self.study = optuna.create_study(study_name=name, storage=storage, direction=_direction(plan))
        self.plan, self.states = plan, optuna.trial.TrialState
        self._trials: dict[int, Any] = {}
        self._told: dict[int, int] = {}

    def update(self, trial: Trial) -> None:
        """Tell the study of legs that it does not know; trials come in the order of their numbers."""
        if trial.number not in self._trials:
            self.study.enqueue_trial(trial.settings)
            self._trials[trial.number] = self.study.ask(_distributions(self.plan))
            self._told[trial.number] = 0
        told = self._trials[trial.number]
        for rung, leg in enumerate(trial.legs[self._told[trial.number] :], start=self._told[trial.number]):
            if leg.value is not None and (rung == 0 or leg.rounds > trial.legs[rung - 1].rounds):
                told.report(leg.value, step=leg.rounds)
            self._finish(told, rung, leg)
        self._told[trial.number] = len(trial.legs)

    def _finish(self, told: Any, rung: int, leg: Leg) -> None:
        told.set_user_attr("megabytes", leg.sent / 1e6)
        if leg.state in ("diverged", "failed"):
            told.set_user_attr("why", leg.why)
            self.study.tell(told, state=self.states.FAIL if leg.state == "failed" else self.states.PRUNED)
        elif rung == len(self.plan.budget.levels) - 1:
            self.study.tell(told, leg.value)

    def prune(self, trial: Trial) -> None:
        """Tell the study that a trial, which is alive, does not go on."""
        self.study.tell(self._trials[trial.number], state=self.states.PRUNED)


def _distributions(plan: Plan) -> dict[str, Any]:
    return {parameter.key: parameter.distribution() for parameter in plan.space}


def _direction(plan: Plan) -> str:
    return "maximize" if plan.objective.maximize else "minimize"


def _optuna() -> Any:
    optuna = import_optuna("lightning-fed tune")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    return optuna
