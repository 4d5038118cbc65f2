"""Choose the engine that plays the rounds of a fit, and log why."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from lightning_fed.core.compiler import find_compiler
from lightning_fed.core.layout import Layout
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.core.round import Engine
from lightning_fed.data.batches import cut_visit
from lightning_fed.data.tensor_loader import in_memory
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.workers import WorkersEngine
from lightning_fed.lightning import pl, rank_zero_info
from lightning_fed.local.stacked.batches import check_plannable, kind_of
from lightning_fed.local.stacked.probe import try_out
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.local.stacked.solver import StackedLocal, why_not_in_c
from lightning_fed.local.stacked.stack import STACK, unfavourable
from lightning_fed.trainer.declarations import declares, undeclared
from lightning_fed.trainer.eligibility import why_not_stacked, why_not_workers
from lightning_fed.trainer.module_state import Attributes

#: Minimum number of seconds that C code has to save; compiling takes about one second.
C_SECONDS = 2
#: Seconds that C code saves per step of a stack: the calls of operators; arithmetic takes as long as before.
SAVED_SECONDS = 1e-4
#: Minimum number of steps per round for which steps on short batches of one size are recorded.
FREQUENT = 10
#: Assumed number of rounds. Not that of the run, because a run resumed for more rounds must choose the same engine.
ROUNDS = 100


@dataclass(frozen=True, eq=False)
class Setting:
    """Settings of a federation from which its engine is chosen.

    Args:
        examples: numbers of samples by client.
        batch_size: number of samples of a training batch.
        cohort: expected number of clients in a round; the size of one cohort would let a resumed run choose otherwise.
        work: local work of a visit.
        keeps_buffers: whether clients keep their own buffers.
        personal: names of the parameters and buffers that clients keep in any case.
    """

    examples: Mapping[ClientId, int]
    batch_size: int
    cohort: int
    work: LocalWork
    keeps_buffers: bool
    personal: tuple[str, ...] = ()

    @property
    def full_batch(self) -> int:
        """The size of the largest batch that a client of the federation has."""
        return min(self.batch_size, max(self.examples.values()))


def steps_by_kind(trainer: pl.Trainer, setting: Setting) -> dict[tuple[int, Hashable], float]:
    """Expected number of local steps per round on batches of each size and kind of samples."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    clients: Counter[tuple[int, Hashable]] = Counter()  # by number and kind of their samples
    for cid in data.client_ids:
        if (memory := in_memory(data.client_dataset(cid))) is not None:  # Plan.all_of refuses other data by client name
            tensors, rows, _ = memory
            clients[len(tensors[0] if rows is None else rows), kind_of(tensors)] += 1
    found: Counter[tuple[int, Hashable]] = Counter()
    for (samples, kind), count in clients.items():
        sizes = cut_visit(trainer, setting.work, samples, data.batch_size, data.drop_last, 1.0).sizes()
        for size, steps in zip(*np.unique(sizes, return_counts=True), strict=True):
            found[int(size), kind] += int(steps) * count
    share = setting.cohort / len(data.client_ids)
    return {kind: share * count for kind, count in found.items()}


def not_worth_it(trainer: pl.Trainer, setting: Setting, steps: Mapping[tuple[int, Hashable], float]) -> str | None:
    """Why ``auto`` does not stack clients: stacking is not faster, or the module does not declare it valid."""
    if setting.cohort < 2:
        return "a round has one client"
    recorded = sum(count for kind, count in steps.items() if kind[0] == setting.full_batch or count >= FREQUENT)
    if recorded < sum(steps.values()) / 2:
        return "most batches have sizes that few others have"
    module = trainer.lightning_module
    if trainer.strategy.root_device.type == "cpu" and (reason := unfavourable(module)):
        return reason
    return None if declares(module, "stackable", "training_step") else undeclared(module)


class Choice:
    """Chooses the engine once per model and settings, and keeps the choice, so that equal runs compute equal bits.

    Args:
        asked: ``auto``, ``sequential`` or ``vectorized``; raises if an engine asked for by name is impossible.
        compile: whether stacked steps run in C; ``auto`` if rounds are long enough to save the time of compiling.
        workers: number of processes for clients that are trained one by one, or of threads for steps in C.
    """

    def __init__(self, asked: str, compile: bool | Literal["auto"], workers: int) -> None:
        self.asked, self.compile, self.workers = asked, compile, workers
        self._decided: tuple[Layout, Attributes | None, StackedLocal | None] | None = None

    def engine(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> Engine:
        """Return the engine of a round; ``alone`` is the engine that asks one client after another."""
        trainer = alone.loop.trainer
        if not cohort:
            return alone
        stacked = self._stacked(alone, setting, cohort)
        if stacked is not None:
            return VectorizedEngine(alone, stacked)
        if self.workers == 1 or len(cohort) == 1:
            return alone
        if reason := why_not_workers(trainer):
            raise ValueError(f"workers={self.workers} is impossible here: {reason}. Use workers=1.")
        return WorkersEngine(alone, self.workers, self._without_workers)

    def _without_workers(self, reason: str) -> None:
        self.workers = 1
        warnings.warn(f"Clients are trained in this process from here on: {reason}.", stacklevel=2)

    def _stacked(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> StackedLocal | None:
        """Return the solver of a stack of clients; None if clients are trained one by one.

        Decides again for another layout, or if attributes of a stacked module changed, because recorded steps freeze
        attributes.
        """
        decided = self._decided
        if decided is None or decided[0] != alone.layout or (decided[1] is not None and decided[1].first_change()):
            stacked = self._decide(alone, setting, cohort)
            attributes = None if stacked is None else Attributes(alone.loop.trainer.lightning_module)
            self._decided = alone.layout, attributes, stacked
        elif (stacked := decided[2]) is not None and not stacked.given_up and (reason := _refusal(alone, setting)):
            stacked.give_up(UnfitError(reason))  # a callback has changed the trainer since the decision
        return None if stacked is None or stacked.given_up else stacked

    def _decide(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> StackedLocal | None:
        if self.asked == "sequential":
            return None
        trainer = alone.loop.trainer
        try:
            check_plannable(trainer.datamodule)  # type: ignore[attr-defined]
            steps = steps_by_kind(trainer, setting)
            unwanted = not_worth_it(trainer, setting, steps) if self.asked == "auto" else None
            if reason := unwanted or _refusal(alone, setting):
                raise UnfitError(reason)
            frequent = {kind for kind, count in steps.items() if count >= FREQUENT}
            wanted = self._saved_by_c(setting) > C_SECONDS
            in_c = wanted and find_compiler() is not None
            stacked = StackedLocal(trainer, alone.layout, setting.full_batch, frequent, in_c, self.workers)
            try_out(stacked, setting.work, alone.round, cohort)
        except UnfitError as error:
            if self.asked == "vectorized":
                raise ValueError(f'engine="vectorized" is impossible here: {error}. Use engine="auto".') from None
            rest = "; compile=True is for clients trained side by side" if self.compile is True else ""
            rank_zero_info(f"Clients are trained one by one: {error}{rest}.")
            return None
        # whether there is C code for their operators is known, and said, when they take their first steps
        reason = why_not_in_c(trainer, alone.layout.dtype) if wanted else None
        how = f", with recorded steps, not in C: {reason}" if reason else ""
        idle = self.workers > 1 and not stacked.in_c
        rest = f"; workers={self.workers} are for clients trained one by one" if idle else ""
        rank_zero_info(f"Clients are trained side by side{how}{rest}.")
        return stacked

    def _saved_by_c(self, setting: Setting) -> float:
        """Estimate the seconds that C code saves, from settings: measured times would make equal runs differ."""
        if self.compile != "auto":
            return math.inf if self.compile else 0
        steps = ROUNDS * (setting.work.steps or setting.work.epochs or 1)
        return steps * -(-setting.cohort // STACK) * SAVED_SECONDS


def _refusal(alone: SequentialEngine, setting: Setting) -> str | None:
    trainer, dtype = alone.loop.trainer, alone.layout.dtype
    return why_not_stacked(trainer, setting.work, setting.keeps_buffers, dtype, setting.personal)
