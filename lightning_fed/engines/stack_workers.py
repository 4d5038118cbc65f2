from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ProgressBar

from lightning_fed._compat import SIGTERMException
from lightning_fed.core import Broadcast, tree_map
from lightning_fed.engines.algebra import rows_of
from lightning_fed.engines.sequential import ClientError
from lightning_fed.engines.team import Team
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.workers import fresh_log
from lightning_fed.logged import Logged
from lightning_fed.round import Replies, Step
from lightning_fed.store import ClientId
from lightning_fed.visit import Visit


@dataclass(frozen=True, eq=False)
class _Answer:
    """What comes back with the states of a stack; without replies where the parent has to ask it itself."""

    replies: Replies | None = None
    logged: Logged | None = None
    questions: Sequence[Any] = ()
    recorded: bool = False


class StackWorkersEngine:
    """Asks the stacks of a cohort in processes beside this one, each a fork of it as it is at the round's beginning.

    Stacks are the same as without them, and so are all numbers.

    Args:
        together: asks a stack.
        workers: number of processes.
    """

    def __init__(self, together: VectorizedEngine, workers: int) -> None:
        self.together, self.workers = together, workers

    @property
    def trainer(self) -> pl.Trainer:
        return self.together.trainer

    def ask(self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]) -> Iterator[Replies]:
        stacks, stacked = self.together.stacks(cohort), self.together.stacked
        known = [[next(states) for _ in visits] for visits in stacks]

        def task(i: int) -> tuple[Any, _Answer]:
            stacked.checked += i  # another client in each stack
            return self._answer(step, known[i], down, stacks[i])

        team = Team(min(self.workers, len(stacks)), len(stacks), task)
        try:
            for i, visits in enumerate(stacks):
                self.together.announce(visits)
                try:
                    state, answer = team.receive(i, self._where(visits))
                finally:
                    if self.trainer.received_sigterm:
                        raise SIGTERMException
                if answer.replies is None:
                    yield from self.together.ask_stack(step, known[i], down, visits)
                else:
                    yield self._take(visits, state, answer)
        finally:
            team.dismiss()
        stacked.checked += len(stacks)

    def _where(self, visits: list[Visit]) -> str:
        alone = self.together.alone
        return f"{alone.where(visits[0].client)} to {visits[-1].client!r}"

    def _take(self, visits: list[Visit], state: Any, answer: _Answer) -> Replies:
        assert answer.replies is not None
        assert answer.logged is not None
        answer.logged.put_into(self.trainer)
        self.together.stacked.recorded &= not answer.recorded
        for visit, question in zip(visits, answer.questions, strict=False):
            visit.question = question
        replies = replace(answer.replies, states=rows_of(state, len(visits)))
        self.together.show(visits, replies)
        return replies

    def _answer(self, step: Step, states: list[Any], down: Broadcast, visits: list[Visit]) -> tuple[Any, _Answer]:
        """In the child: the replies of a stack, and what they logged."""
        trainer, together = self.trainer, self.together
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [c for c in callbacks if not isinstance(c, ProgressBar)]
        results, before = fresh_log(trainer), together.stacked.graphs.count
        together.alone.workspace.reset()
        try:
            replies, logs = together.together(step, states, down, visits)
        except ClientError:
            raise
        except Exception:
            return None, _Answer()  # the parent finds out what is wrong
        for each in logs:
            each.replay(trainer)
        state = tree_map(lambda *rows: torch.stack(rows), *replies.states)
        questions = [visit.question for visit in visits] if visits[0].question is not None else []
        recorded = together.stacked.graphs.count > before
        logged = Logged.of(results, trainer.lightning_module)
        return state, _Answer(replace(replies, states=[]), logged, questions, recorded)
