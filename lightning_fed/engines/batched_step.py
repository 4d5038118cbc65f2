"""An algorithm's client step for many clients at once: the same formulas, on stacked states."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import is_dataclass
from typing import Any, NoReturn

import torch
from torch import Generator, Tensor
from torch.func import vmap

from lightning_fed.core.algorithm import tree_map
from lightning_fed.core.messages import Broadcast, Replies, Reply
from lightning_fed.core.problem import Local, LocalProblem, Question, Solution
from lightning_fed.core.round import Step
from lightning_fed.local.stacked.batches import Plan
from lightning_fed.local.stacked.problem import Answers, Questions

#: Answers all questions of a stack.
Solve = Callable[[Questions], Answers]


class DiffersError(Exception):
    """Clients do not all do the same: they have to be talked to one by one."""


class _Answer(torch.autograd.Function):
    """Where the transform that runs all client steps at once meets the solver that answers them all at once."""

    @staticmethod
    def forward(together: Together, rho: float, i: Tensor, *parts: Tensor | None) -> NoReturn:
        raise DiffersError("the question of a stack was asked outside of it")

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Nothing is differentiated."""

    @staticmethod
    def vmap(info: Any, in_dims: Any, together: Together, rho: float, i: Tensor, *parts: Tensor | None) -> Any:
        start, linear, center = (
            part if part is None or dim is not None else part.expand(info.batch_size, *part.shape)
            for part, dim in zip(parts, in_dims[3:], strict=True)
        )
        assert start is not None
        together.answers = together.solve_all(Questions(start, Question(linear, rho, center).constant, rho))
        return together.answers.x, 0


class Together(Local):
    """The ``Local`` that all clients of a stack talk to at once.

    Args:
        solve_all: answers their questions.
        plan: of any of them: all have as many steps.
    """

    def __init__(self, solve_all: Solve, plan: Plan, lr: float) -> None:
        self.solve_all, self.steps, self.lr = solve_all, plan.steps, lr
        self.answers: Answers | None = None
        self.i: Tensor | None = None

    def answer(self, problem: LocalProblem) -> Solution:
        if not problem.is_plain:
            raise DiffersError("steps are mapped, cut short or corrected")
        if self.answers is not None:
            raise DiffersError("clients are asked more than once")
        question = problem.question
        x: Tensor = _Answer.apply(self, question.rho, self.i, problem.start, question.linear, question.center)
        return Solution(x, steps=self.steps, lr_sum=self.steps * self.lr)

    def gradient(self, x: Tensor) -> Tensor:
        raise DiffersError("gradients are asked for")

    def rng(self, purpose: str) -> Generator:
        raise DiffersError("every client has draws of its own")


def all_at_once(step: Step, states: Sequence[Any], down: Broadcast, local: Together) -> Replies:
    """The replies of clients whose steps differ in nothing but numbers; raises :class:`DiffersError` otherwise."""
    said: list[Reply[Any, Any]] = []

    def one(i: Tensor, state: Any) -> tuple[Any, Any, Tensor]:
        local.i = i
        said.append(step(state, down, local))
        return said[0].state, said[0].message, said[0].x_i

    stacked = tree_map(lambda *rows: torch.stack(rows), *states)
    with torch.no_grad():
        state, message, x_i = vmap(one)(torch.arange(len(states)), stacked)
    if local.answers is None or said[0].loss == said[0].loss:
        raise DiffersError("the step does not pass on the answer's loss")
    return Replies(
        rows_of(state, len(states)),
        message,
        x_i,
        local.answers.losses,
        [said[0].steps] * len(states),
        [said[0].bytes_up] * len(states),
        [said[0].arrived] * len(states),
        [said[0].gradients] * len(states),
    )


def rows_of(stacked: Any, m: int) -> list[Any]:
    """The records of a stack one by one, each in memory of its own: they are kept for different times."""
    columns: list[Sequence[Tensor]] = []
    unbind_copy: Any = torch.unbind_copy  # whose type says that it returns nothing
    tree_map(lambda leaf: columns.append(unbind_copy(leaf)), stacked)
    if not columns:
        return [stacked] * m
    rows = zip(*columns, strict=True)
    if is_dataclass(stacked) and all(isinstance(field, Tensor) for field in vars(stacked).values()):  # the quick way
        kind: Any = type(stacked)
        return [kind(*row) for row in rows]
    return [_record(stacked, row) for row in rows]


def _record(like: Any, row: Sequence[Tensor]) -> Any:
    leaves = iter(row)
    return tree_map(lambda _: next(leaves), like)
