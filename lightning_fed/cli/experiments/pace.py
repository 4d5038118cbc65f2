"""Time left in a list of runs, from the measured pace of each setting."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from tqdm.auto import tqdm

from lightning_fed.cli.experiments.run import Run


class Pace:
    """Measures seconds per round for each setting, because a round of one setting may cost a hundred of another.

    ``order`` has the first run of every setting before all others, so that every pace is known early. Until then
    ``left`` gives a lower bound, marked by ">".

    Args:
        runs: unfinished runs.
        clock: seconds, growing.
    """

    def __init__(self, runs: Sequence[Run], clock: Callable[[], float] = time.monotonic) -> None:
        first = {run.setting.name: run for run in reversed(runs)}
        self.order = sorted(runs, key=lambda run: run is not first[run.setting.name])
        self.missing = {id(run): float(run.rounds - run.resumes_at()) for run in runs}
        self.clock = clock
        self.seconds: dict[str, float] = {}
        self.rounds: dict[str, float] = {}
        self._now, self._since = "", 0.0

    def begin(self, run: Run) -> None:
        """Start a run; what it does before its first round counts as part of its rounds."""
        self._run, self._now, self._since = run, run.setting.name, self.clock()

    def tick(self, rounds: float) -> None:
        """Count a fraction of a round of the run that was begun."""
        self.missing[id(self._run)] = max(0.0, self.missing[id(self._run)] - rounds)
        self.rounds[self._now] = self.rounds.get(self._now, 0.0) + rounds
        self._spend()

    def end(self) -> None:
        """Finish the run, also one that diverged before its last round."""
        self.missing[id(self._run)] = 0.0
        self._spend()

    def left(self) -> str:
        """Time that the missing rounds take at the measured paces.

        While a setting with missing rounds is not measured, this is a lower bound: ", > 01:30 left".
        """
        measured = {name: self.seconds[name] / rounds for name, rounds in self.rounds.items() if rounds > 0}
        known = unknown = 0.0
        for run in self.order:
            if run.setting.name in measured:
                known += self.missing[id(run)] * measured[run.setting.name]
            else:
                unknown += self.missing[id(run)]
        return f"{'> ' if unknown else ''}{tqdm.format_interval(known)} left"

    def _spend(self) -> None:
        now = self.clock()
        self.seconds[self._now] = self.seconds.get(self._now, 0.0) + now - self._since
        self._since = now
