"""Successive halving: all trials to the first rung, the best of them to the next, and so on."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from lightning_fed.cli.interruption import check_interrupted
from lightning_fed.cli.tuning.journal import Journal, Leg, Trial
from lightning_fed.cli.tuning.plan import Plan
from lightning_fed.cli.tuning.space import labels
from lightning_fed.cli.tuning.study import StudyFile, suggest

Go = Callable[[Trial], Leg]


class Halving:
    """Runs the legs that the journal does not have yet, in an order that the plan determines.

    Args:
        plan: what to do.
        journal: what is done.
        study: the same, for Optuna's tools.
        go: runs the next leg of a trial.
    """

    def __init__(self, plan: Plan, journal: Journal, study: StudyFile, go: Go) -> None:
        self.plan, self.journal, self.study, self.go = plan, journal, study, go
        self.names = labels([parameter.key for parameter in plan.space])

    def run(self) -> list[Trial]:
        """All trials, in the order of their numbers."""
        trials: list[Trial] = []
        for number in range(self.plan.trials):
            trial = self.journal.read(number)
            if trial is None:
                trial = self.journal.start(number, suggest(self.plan, number, trials))
            self._advance(trial, 0)
            trials.append(trial)
        going = trials
        for rung in range(1, len(self.plan.budget.levels)):
            going = self._promote(going, rung)
            for trial in going:
                self._advance(trial, rung)
        self._keep_best_checkpoint(trials)
        return trials

    def _advance(self, trial: Trial, rung: int) -> None:
        """Take a trial to a rung, if it is not there yet."""
        check_interrupted()
        if len(trial.legs) <= rung:
            self.journal.add(trial, self.go(trial))
            print(self._line(trial, rung), flush=True)
        self.study.update(trial)
        if not trial.alive:
            self.journal.forget_checkpoint(trial)

    def _promote(self, trials: Sequence[Trial], rung: int) -> list[Trial]:
        """The best trials, in the order of their numbers; the others lose their checkpoints."""
        alive = best_first([trial for trial in trials if trial.alive], self.plan)
        for trial in alive[self.plan.kept(rung) :]:
            self.study.prune(trial)
            self.journal.forget_checkpoint(trial)
        return sorted(alive[: self.plan.kept(rung)], key=lambda trial: trial.number)

    def _keep_best_checkpoint(self, trials: Sequence[Trial]) -> None:
        for trial in ranking(trials, self.plan)[1:]:
            self.journal.forget_checkpoint(trial)

    def _line(self, trial: Trial, rung: int) -> str:
        settings = " ".join(f"{self.names[key]}={short(value)}" for key, value in trial.settings.items())
        leg, budget = trial.last, self.plan.budget
        where = f"rung {rung + 1}/{len(budget.levels)}, {leg.rounds} rounds, {leg.sent / 1e6:.4g} MB"
        result = f"{leg.state}: {leg.why}" if leg.value is None else f"{self.plan.objective.name} {leg.value:.6g}"
        return f"{where}: trial {trial.number} ({settings}): {result}"


def best_first(trials: Sequence[Trial], plan: Plan) -> list[Trial]:
    """Trials with a value, the best first; of equals the first."""
    return sorted(trials, key=lambda trial: (plan.objective.rank(trial.last.value or 0.0), trial.number))


def ranking(trials: Sequence[Trial], plan: Plan) -> list[Trial]:
    """All trials: those that came to the highest rung first, by their values; then what diverged, then what failed."""
    alive = [trial for trial in trials if trial.alive]
    ranked = [
        trial
        for rung in range(len(plan.budget.levels), 0, -1)
        for trial in best_first([trial for trial in alive if len(trial.legs) == rung], plan)
    ]
    others = [trial for trial in trials if not trial.alive]
    return [*ranked, *sorted(others, key=lambda trial: (trial.last.state, -len(trial.legs), trial.number))]


def short(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
