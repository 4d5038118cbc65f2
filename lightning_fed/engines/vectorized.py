from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_fed.callbacks.base import listening, notify
from lightning_fed.callbacks.progress import FederatedProgressBar
from lightning_fed.core import Broadcast, Reply, Solution, StepMap
from lightning_fed.engines.sequential import ClientError, SequentialEngine
from lightning_fed.local.module import ModuleLocal
from lightning_fed.local.plan import Plan
from lightning_fed.local.stacked import STACK, STACK_NUMBERS, Question, StackedLocal
from lightning_fed.round import Step
from lightning_fed.store import ClientId
from lightning_fed.vector import overwrite, parameters_of
from lightning_fed.visit import Visit

log = logging.getLogger(__name__)


class _AskedError(Exception):
    """A client's step has come to a question that is not answered yet."""

    def __init__(self, question: Question) -> None:
        self.question = question


class _Talk:
    """One client's step, run again with one answer more until it is through: steps are pure functions."""

    def __init__(self, alone: ModuleLocal) -> None:
        self.alone = alone
        self.answers: list[Solution] = []
        self.gradients: list[Tensor] = []
        self._heard = self._differentiated = 0

    def attempt(self, step: Step, state: Any, down: Broadcast) -> Reply[Any, Any] | Question:
        self._heard = self._differentiated = 0
        try:
            return step(state, down, self)
        except _AskedError as asked:
            return asked.question

    def solve(
        self,
        start: Tensor,
        *,
        linear: Tensor | None = None,
        rho: float = 0.0,
        center: Tensor | None = None,
        after_step: StepMap | None = None,
        evaluate_at: StepMap | None = None,
        work: float = 1.0,
    ) -> Solution:
        if self._heard == len(self.answers):
            raise _AskedError(Question(start, linear, rho, center, after_step, evaluate_at, work))
        self._heard += 1
        return self.answers[self._heard - 1]

    def gradient(self, x: Tensor) -> Tensor:
        if self._differentiated == len(self.gradients):
            self.gradients.append(self.alone.gradient(x))
        self._differentiated += 1
        return self.gradients[self._differentiated - 1]

    def rng(self, purpose: str) -> Generator:
        return self.alone.rng(purpose)


class VectorizedEngine:
    """Asks many clients at once: their local steps are steps of one stack of parameters.

    Args:
        alone: asks clients one by one: what they do apart from local steps, and whatever cannot be stacked after all.
        stacked: answers the questions of a stack.
    """

    def __init__(self, alone: SequentialEngine, stacked: StackedLocal) -> None:
        self.alone, self.stacked = alone, stacked

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any]]:
        size = max(1, min(STACK, STACK_NUMBERS // self.stacked.layout.numel))
        count = -(-len(cohort) // size)
        size = -(-len(cohort) // count)
        for first in range(0, len(cohort), size):
            ids = cohort[first : first + size]
            visits = [Visit(self.alone.round, cid, first + i, len(cohort)) for i, cid in enumerate(ids)]
            yield from self._ask(step, [next(states) for _ in ids], down, visits)

    def _ask(self, step: Step, states: list[Any], down: Broadcast, visits: list[Visit]) -> Iterator[Reply[Any, Any]]:
        trainer = self.alone.loop.trainer
        for visit in visits:
            notify(trainer, "on_client_start", visit)
        try:
            replies = self._together(step, states, down, visits)
        except ClientError:
            raise
        except Exception as error:  # whoever is at fault is found one by one
            log.info("These clients are trained one by one: %s: %s", type(error).__name__, error)
            for state, visit in zip(states, visits, strict=True):
                yield self.alone.visit(step, state, down, visit)
            return
        others = [c for c in listening(trainer, "on_client_end") if not isinstance(c, FederatedProgressBar)]
        for visit, reply in zip(visits, replies, strict=True):
            self.alone.buffers[visit.client] = self.alone.workspace.buffers
            if others:
                overwrite(parameters_of(self.alone.workspace.module), self.stacked.layout.split(reply.x_i))
            notify(trainer, "on_client_end", visit, reply)
            yield reply

    def _together(self, step: Step, states: list[Any], down: Broadcast, visits: list[Visit]) -> list[Reply[Any, Any]]:
        self.alone.workspace.reset()
        talks = [_Talk(self.alone.local(visit)) for visit in visits]
        replies: dict[int, Reply[Any, Any]] = {}
        while len(replies) < len(visits):
            questions: dict[int, Question] = {}
            for i, visit in enumerate(visits):
                if i not in replies:
                    with self.alone.naming(visit.client):
                        said = talks[i].attempt(step, states[i], down)
                    if isinstance(said, Question):
                        questions[i] = said
                    else:
                        self.alone.check(visit.client, said)
                        replies[i] = said
            if questions:
                for i, solution in zip(questions, self._solve(questions, visits), strict=True):
                    talks[i].answers.append(solution)
        return [replies[i] for i in range(len(visits))]

    def _solve(self, questions: dict[int, Question], visits: list[Visit]) -> list[Solution]:
        trainer, server = self.alone.loop.trainer, self.alone.loop.server
        plans = []
        for i, question in questions.items():
            visits[i].work = question.work
            plans.append(Plan.of(trainer, server, visits[i]))
        solutions = self.stacked.solve(list(questions.values()), plans)
        for i, solution in zip(questions, solutions, strict=True):
            visits[i].step, visits[i].loss = solution.steps, torch.tensor(solution.loss)
        return solutions
