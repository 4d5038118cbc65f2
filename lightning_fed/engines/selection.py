"""Which engine plays the rounds of a fit, and why."""

from __future__ import annotations

import math
import warnings
from collections import Counter
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import nn, optim

from lightning_fed.core.layout import Layout, buffers_of
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.core.round import Engine
from lightning_fed.data.batches import cut_visit
from lightning_fed.data.tensor_loader import in_memory
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.workers import WorkersEngine, why_not_workers
from lightning_fed.lightning import DoublePrecision, Precision, pl, rank_zero_info
from lightning_fed.local.stacked.batches import check_plannable, kind_of
from lightning_fed.local.stacked.probe import try_out
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.local.stacked.solver import StackedLocal
from lightning_fed.local.stacked.stack import STACK, unfavourable
from lightning_fed.local.steps.hookless import needs_hooks
from lightning_fed.trainer.declarations import declares, undeclared
from lightning_fed.trainer.hooks import reading
from lightning_fed.trainer.module_state import Attributes

#: Optimisers that treat every number on its own, so that a stack of models is just a larger model.
ELEMENTWISE = (
    optim.SGD,
    optim.Adam,
    optim.AdamW,
    optim.Adamax,
    optim.NAdam,
    optim.RAdam,
    optim.RMSprop,
    optim.Adagrad,
    optim.Adadelta,
)

#: C code pays if it saves more seconds than this: it takes one to compile.
C_SECONDS = 2
#: What it saves of a step of a stack: calls of operators, for the arithmetic takes as long as before.
SAVED_SECONDS = 1e-4
#: Steps in a round from which on it pays to record steps on short batches of one size.
FREQUENT = 10
#: Rounds that are reckoned with. Not those of the run: one that is resumed for more rounds has to have the same bits.
ROUNDS = 100


@dataclass(frozen=True, eq=False)
class Setting:
    """What decides about the engine of a federation.

    Args:
        examples: numbers of samples by client.
        batch_size: of training batches.
        cohort: expected number of clients in a round. That of the first one would make a resumed run decide otherwise.
        work: of a visit.
        keeps_buffers: whether clients keep buffers of their own.
    """

    examples: Mapping[ClientId, int]
    batch_size: int
    cohort: int
    work: LocalWork
    keeps_buffers: bool

    @property
    def full_batch(self) -> int:
        """The size of the largest batch that a client of the federation has."""
        return min(self.batch_size, max(self.examples.values()))


def steps_by_kind(trainer: pl.Trainer, setting: Setting) -> dict[tuple[int, Hashable], float]:
    """How many local steps a round is expected to have on batches of each size and kind of samples."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    clients: Counter[tuple[int, Hashable]] = Counter()  # by number and kind of their samples
    for cid in data.client_ids:
        if (memory := in_memory(data.client_dataset(cid))) is not None:  # others are told later, and by name
            tensors, rows, _ = memory
            clients[len(tensors[0] if rows is None else rows), kind_of(tensors)] += 1
    found: Counter[tuple[int, Hashable]] = Counter()
    for (samples, kind), count in clients.items():
        sizes = cut_visit(trainer, setting.work, samples, data.batch_size, data.drop_last, 1.0).sizes()
        for size, steps in zip(*np.unique(sizes, return_counts=True), strict=True):
            found[int(size), kind] += int(steps) * count
    share = setting.cohort / len(data.client_ids)
    return {kind: share * count for kind, count in found.items()}


def not_worth_it(trainer: pl.Trainer, setting: Setting) -> str | None:
    """Why stacking clients would not be faster; None if it should be."""
    if setting.cohort < 2:
        return "a round has one client"
    steps, full = steps_by_kind(trainer, setting), setting.full_batch
    together = sum(count for kind, count in steps.items() if kind[0] == full or count >= FREQUENT)
    if together < sum(steps.values()) / 2:
        return "most batches have sizes that few others have"
    return unfavourable(trainer.lightning_module) if trainer.strategy.root_device.type == "cpu" else None


def impossible(trainer: pl.Trainer, setting: Setting, layout_dtype: torch.dtype) -> str | None:
    """Why clients cannot be stacked, as far as can be seen without trying."""
    module = trainer.lightning_module
    if reason := needs_hooks(trainer):
        return reason
    if type(trainer.precision_plugin) not in (Precision, DoublePrecision):
        return f"precision {trainer.precision} is mixed"
    if len(trainer.optimizers) != 1 or type(trainer.optimizers[0]) not in ELEMENTWISE:
        return f"{', '.join(type(o).__name__ for o in trainer.optimizers)} may mix the clients of a stack"
    if trainer.optimizers[0]._optimizer_step_pre_hooks or trainer.optimizers[0]._optimizer_step_post_hooks:
        return "a hook listens to the optimiser"
    if name := hooked(module):
        return f"a hook listens to {name}"
    trained = {p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.requires_grad}
    if trained != {p for p in module.parameters() if p.requires_grad}:
        return "the optimiser does not train all parameters"
    if any(p.dtype != layout_dtype for p in trained):
        return "parameters have different precisions"
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        return "a scheduler steps with every batch"
    if setting.work.tolerance is not None:
        return "visits end when their problem is solved well enough"
    if setting.keeps_buffers and buffers_of(module):
        return "clients keep buffers of their own"
    for hook in ("on_client_start", "on_client_step"):
        for callback in reading(trainer, hook):
            return f"{type(callback).__name__} has an {hook} hook"
    return None


def hooked(module: nn.Module) -> str | None:
    """The name of a parameter or a part with a hook, which may change or keep what it sees; None if there is none."""
    for name, p in module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return name
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return name or type(part).__name__
    return None


class Choice:
    """Decides once per model and its settings, and stays with it, so that equal runs do equal things.

    Args:
        asked: ``auto``, ``sequential`` or ``vectorized``; what was asked for by name and is impossible is an error.
        compile: whether stacked steps are written in C; ``auto`` where rounds are long enough to pay for it.
        workers: processes for clients that are trained one by one, threads for those whose steps are written in C.
    """

    def __init__(self, asked: str, compile: bool | Literal["auto"], workers: int) -> None:
        self.asked, self.compile, self.workers = asked, compile, workers
        self._decided: tuple[Layout, Attributes | None, StackedLocal | None] | None = None

    def engine(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> Engine:
        """The engine of a round; ``alone`` asks one client after another."""
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
        """Whoever answers for a stack of clients; None if clients are asked one by one."""
        stacked = self._decision(alone, setting, cohort)
        if stacked is None or stacked.given_up:
            return None
        if reason := impossible(
            alone.loop.trainer, setting, alone.layout.dtype
        ):  # a callback may have changed something
            stacked.give_up(UnfitError(reason))
            return None
        return stacked

    def _decision(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> StackedLocal | None:
        """Decided anew for another layout, or when settings of a stacked module have changed: its steps freeze them."""
        if self._decided is not None and self._decided[0] == alone.layout:
            attributes, stacked = self._decided[1:]
            if attributes is None or attributes.first_change() is None:
                return stacked
        stacked = self._decide(alone, setting, cohort)
        attributes = None if stacked is None else Attributes(alone.loop.trainer.lightning_module)
        self._decided = alone.layout, attributes, stacked
        return stacked

    def _decide(self, alone: SequentialEngine, setting: Setting, cohort: Sequence[ClientId]) -> StackedLocal | None:
        if self.asked == "sequential":
            return None
        trainer, layout = alone.loop.trainer, alone.layout
        try:
            check_plannable(trainer.datamodule)  # type: ignore[attr-defined]
            if self.asked == "auto":
                self._check_worth(trainer, setting)
            if reason := impossible(trainer, setting, layout.dtype):
                raise UnfitError(reason)
            stacked = self._made(trainer, setting, layout)
            try_out(stacked, setting.work, alone.round, cohort)
        except UnfitError as error:
            if self.asked == "vectorized":
                raise ValueError(f'engine="vectorized" is impossible here: {error}. Use engine="auto".') from None
            rank_zero_info(f"Clients are trained one by one: {error}.")
            return None
        how = ", in C" if stacked.in_c else ""
        idle = self.workers > 1 and not stacked.in_c
        rest = f"; workers={self.workers} are for clients trained one by one" if idle else ""
        rank_zero_info(f"Clients are trained side by side{how}{rest}.")
        return stacked

    def _check_worth(self, trainer: pl.Trainer, setting: Setting) -> None:
        """What ``auto`` asks for: that stacking should be faster, and that the module says it is right."""
        module = trainer.lightning_module
        if reason := not_worth_it(trainer, setting):
            raise UnfitError(reason)
        if not declares(module, "stackable", "training_step"):
            raise UnfitError(undeclared(module))

    def _made(self, trainer: pl.Trainer, setting: Setting, layout: Layout) -> StackedLocal:
        in_c = self._saved_by_c(setting) > C_SECONDS
        frequent = {kind for kind, steps in steps_by_kind(trainer, setting).items() if steps >= FREQUENT}
        return StackedLocal(trainer, layout, setting.full_batch, frequent, in_c, self.workers)

    def _saved_by_c(self, setting: Setting) -> float:
        """Seconds that C code should save in many rounds, by settings: a clock would make equal runs differ."""
        if self.compile != "auto":
            return math.inf if self.compile else 0
        steps = ROUNDS * (setting.work.steps or setting.work.epochs or 1)
        return steps * -(-setting.cohort // STACK) * SAVED_SECONDS
