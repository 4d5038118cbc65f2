from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import Generator, Tensor

from lightning_fed.core.failures import Failure
from lightning_fed.core.layout import is_finite, overwrite, parameters_of
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Broadcast, Replies, Reply
from lightning_fed.core.problem import Local, LocalProblem, Solution
from lightning_fed.core.reach import Reach
from lightning_fed.core.records import leaves_of
from lightning_fed.core.round import Step
from lightning_fed.engines.sequential import ClientError, SequentialEngine
from lightning_fed.lightning import pl
from lightning_fed.local.server_snapshot import Workspace
from lightning_fed.local.solver import ModuleLocal
from lightning_fed.local.stacked.batches import Plan
from lightning_fed.local.stacked.log import StepLog
from lightning_fed.local.stacked.problem import StackedProblem
from lightning_fed.local.stacked.solver import StackedLocal
from lightning_fed.local.stacked.stack import STACK, STACK_NUMBERS
from lightning_fed.trainer.hooks import Visit, listening, notify, reading


class _AskedError(Exception):
    """Interrupts a client's step that asks for the solution of a new problem."""

    def __init__(self, asked: LocalProblem) -> None:
        self.asked = asked


class _Talk(Local):
    """Re-runs one client's step with cached solutions until it returns, which is valid because steps are pure."""

    def __init__(self, alone: ModuleLocal, workspace: Workspace) -> None:
        self.alone, self.workspace = alone, workspace
        self.answers: list[Solution] = []
        self.gradients: list[Tensor] = []
        self._heard = self._differentiated = 0

    def attempt(self, step: Step, state: Any, down: Broadcast) -> Reply[Any, Any] | LocalProblem:
        self._heard = self._differentiated = 0
        try:
            return step(state, down, self)
        except _AskedError as error:
            return error.asked

    def answer(self, problem: LocalProblem) -> Solution:
        if self._heard == len(self.answers):
            self.alone.visit.work = problem.work
            if problem.estimate is None:
                raise _AskedError(problem)
            self.workspace.reset()  # solve alone: with an estimate, each step takes two gradients, which stacks do not
            self.answers.append(self.alone.answer(problem))
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
        alone: asks clients one by one, for gradients over all data and if a stack fails.
        stacked: solves the problems of a stack.
    """

    def __init__(self, alone: SequentialEngine, stacked: StackedLocal) -> None:
        self.alone, self.stacked = alone, stacked

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Replies | Failure]:
        visits = [Visit(self.alone.round, cid, i, len(cohort)) for i, cid in enumerate(cohort)]
        yield from self.ask_visits(step, states, down, visits)

    def ask_visits(
        self, step: Step, states: Iterator[Any], down: Broadcast, visits: Sequence[Visit]
    ) -> Iterator[Replies | Failure]:
        """Ask some clients of a cohort, in its order; the first of them begins a stack."""
        size = self.size
        for first in range(0, len(visits), size):
            some = list(visits[first : first + size])
            for visit in some if listening(self.trainer, "on_client_start") else ():
                notify(self.trainer, "on_client_start", visit)
            yield from self._ask(step, [next(states) for _ in some], down, some)

    @property
    def size(self) -> int:
        """Clients of a stack: a power of two, so that each stack is one node of the tree that sums messages."""
        most = max(1, min(STACK, STACK_NUMBERS // self.stacked.layout.numel))
        return 1 << (most.bit_length() - 1)

    @property
    def trainer(self) -> pl.Trainer:
        return self.alone.loop.trainer

    def _ask(self, step: Step, states: list[Any], down: Broadcast, visits: list[Visit]) -> Iterator[Replies | Failure]:
        self.alone.workspace.reset()  # the visits of a stack before may have left a client's model in the module
        try:
            replies, logs = self._together(step, states, down, visits)
        except Exception as error:  # a user's step may raise anything; one by one it is raised with a name
            if isinstance(error, ClientError) and not self.alone.policy.lenient:
                raise
            failed = False
            for state, visit in zip(states, visits, strict=True):
                reply = self.alone.visit(step, state, down, visit)
                failed = failed or isinstance(reply, Failure)
                yield reply if isinstance(reply, Failure) else Replies.of(reply)
            if not failed and not isinstance(error, ClientError):  # else a client was at fault, not the stack
                self.stacked.give_up(error)
            return
        for each in logs:
            each.replay(self.trainer)
        for visit in visits:  # steps of a stack run on a copy of the module, so they change only parameters
            self.alone.left[visit.client] = self.alone.workspace.unchanged
        self._show(visits, replies)
        yield replies

    def _show(self, visits: list[Visit], replies: Replies) -> None:
        """Notify callbacks of the ends of visits; load each client's model if a callback may read the module."""
        listeners = listening(self.trainer, "on_client_end")
        look = bool(reading(self.trainer, "on_client_end"))
        for visit, reply in zip(visits, replies.apart(), strict=True) if listeners else ():
            if look:
                overwrite(parameters_of(self.alone.workspace.module), self.stacked.layout.split(reply.x_i))
            visit.step, visit.loss = reply.steps, torch.tensor(reply.loss)
            notify(self.trainer, "on_client_end", visit, reply)

    def _together(
        self, step: Step, states: list[Any], down: Broadcast, visits: list[Visit]
    ) -> tuple[Replies, list[StepLog]]:
        """Run clients' steps until each asks for a solution, solve these problems at once, repeat until all reply."""
        talks = [_Talk(self.alone.local(visit), self.alone.workspace) for visit in visits]
        replies: dict[int, Reply[Any, Any]] = {}
        logs: list[StepLog] = []
        while len(replies) < len(visits):
            asked: dict[int, LocalProblem] = {}
            for i, visit in enumerate(visits):
                if i not in replies:
                    with self.alone.naming(visit.client):
                        said = talks[i].attempt(step, states[i], down)
                    if isinstance(said, LocalProblem):
                        asked[i] = said
                    else:
                        replies[i] = said
            if asked:
                plans = Plan.all_of(self.trainer, self.alone.loop.work, [visits[i] for i in asked])
                answers = self.stacked.solve(StackedProblem.of(list(asked.values())), plans)
                logs.append(answers.log)
                unbind_copy: Any = torch.unbind_copy  # torch's stubs declare that it returns None
                points = unbind_copy(answers.x)  # copies: a view in one client's state would keep the whole stack
                for i, plan, x, loss in zip(asked, plans, points, answers.losses, strict=True):
                    reach = Reach.of(plan.steps, answers.lr, answers.momentum, asked[i].question.rho)
                    found = Solution(x, loss, plan.steps, plan.steps * answers.lr, reach=reach)
                    with self.alone.naming(visits[i].client):
                        talks[i].answers.append(talks[i].alone.spoiled(found))
                    visits[i].question = None if asked[i].is_mapped else asked[i].question
        stacked = Replies.of(*(replies[i] for i in range(len(visits))))
        self._check(stacked, visits)
        return stacked, logs

    def _check(self, replies: Replies, visits: list[Visit]) -> None:
        finite = is_finite(replies.x_i) and all(map(is_finite, leaves_of(replies.message)))
        if not finite or self.alone.policy.max_distance is not None:
            for visit, reply in zip(visits, replies.apart(), strict=True):
                self.alone.check(visit.client, reply)
