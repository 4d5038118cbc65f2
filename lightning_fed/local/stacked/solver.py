"""Do the local work of many clients at once: one training step of a stack is one pass through a recorded graph."""

from __future__ import annotations

import math
import warnings
from collections import defaultdict
from collections.abc import Collection, Hashable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.core.compiler import MISSING, find_compiler
from lightning_fed.core.layout import Layout
from lightning_fed.core.problem import StepMap
from lightning_fed.lightning import SIGTERMException, pl
from lightning_fed.local.native.codegen.matmul import LANES
from lightning_fed.local.stacked.batches import Batches, Plan
from lightning_fed.local.stacked.log import StepLog
from lightning_fed.local.stacked.phases import Parts
from lightning_fed.local.stacked.problem import Answers, StackedProblem
from lightning_fed.local.stacked.pure_step import Outline, StackedLoss, UnfitError
from lightning_fed.local.stacked.recorder import Function, Graphs
from lightning_fed.local.stacked.stack import Direction, Stack, rounded, stacked_optimizer
from lightning_fed.trainer.eligibility import is_plain

Numbers = NDArray[np.int64]

#: Number of clients whose short batches of one size are computed together.
SHORT_STACK = 8


def why_not_in_c(trainer: pl.Trainer, dtype: torch.dtype) -> str | None:
    """Why no steps of a stack can run in C; None if they can where there is C code for their operators."""
    if find_compiler() is None:
        return MISSING
    if trainer.strategy.root_device.type != "cpu":
        return "the device is not a CPU"
    if dtype not in LANES:
        return f"there is no C code for {str(dtype).removeprefix('torch.')}"
    optimizer = trainer.optimizers[0]
    return None if is_plain(optimizer) else f"{type(optimizer).__name__}, as it is set, is not plain SGD"


class StackedLocal:
    """Solves the problems of many clients together, by the steps of the trainer's module.

    Args:
        layout: order of the parameters in ``x``; all of them are trained by the trainer's one optimiser.
        full_batch: samples of a full batch. Steps on full batches can run in C.
        frequent: sizes of short batches, each with the kind of its samples, that are frequent enough to be recorded.
            Steps on other sizes are taken one client at a time, because recording them would take longer.
        in_c: run steps in C, if their operators allow it.
        threads: minimum number of threads for steps in C; torch's number of threads if that is larger.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        layout: Layout,
        full_batch: int,
        frequent: Collection[Hashable] = (),
        in_c: bool = False,
        threads: int = 1,
    ) -> None:
        self.trainer, self.layout, self.full_batch, self.threads = trainer, layout, full_batch, threads
        self.frequent = frequent
        # Lightning's loop runs a training step in this context, which may set the default dtype
        context = trainer.precision_plugin.train_step_context
        self.loss = StackedLoss(trainer.lightning_module, layout.names, context)
        self.graphs = Graphs()
        self.in_c = in_c and layout.dtype in LANES and trainer.strategy.root_device.type == "cpu"
        self._outlines: WeakKeyDictionary[Parts, Outline] = WeakKeyDictionary()
        self.scratch: dict[Hashable, Tensor] = {}
        self.given_up = False

    def give_up(self, error: Exception) -> None:
        """Stop stacking from the next round on, because clients that train one by one failed as a stack."""
        if not self.given_up:
            self.given_up = True
            warnings.warn(
                f"Clients cannot be trained side by side: {type(error).__name__}: {error}. From here on they are"
                " trained one by one.",
                stacklevel=2,
            )

    def solve(self, problem: StackedProblem, plans: Sequence[Plan]) -> Answers:
        log, group = StepLog(), self.trainer.optimizers[0].param_groups[0]
        x, losses = torch.empty_like(problem.start), torch.empty(len(plans), dtype=torch.float64)
        for ids in self._stacks(plans):
            # fill the stack up with copies of the first client; their solutions are dropped
            members = [*ids, *ids[:1] * (self._width(len(ids), plans[ids[0]]) - len(ids))]
            run = _Run(self, problem.of_some(members), [plans[i] for i in members], ids, log)
            x[ids], losses[ids] = run.go()
        vars(self.trainer.optimizers[0])["_opt_called"] = True  # schedulers warn if no optimiser step came before
        return Answers(x, losses.tolist(), float(group["lr"]), float(group.get("momentum", 0.0)), log)

    def _stacks(self, plans: Sequence[Plan]) -> list[list[int]]:
        """Group clients into stacks by the shape of their batches."""
        groups: dict[tuple[Hashable, int], list[int]] = defaultdict(list)
        for i, plan in enumerate(plans):
            groups[plan.kind, plan.batch_size].append(i)
        stacks = []
        for (kind, size), ids in groups.items():
            short = size != self.full_batch and self.is_recorded(size, kind)
            width = SHORT_STACK if short else len(ids)
            stacks += [ids[first : first + width] for first in range(0, len(ids), width)]
        return stacks

    def _width(self, m: int, plan: Plan) -> int:
        """Size of the stack for m clients, filled up with copies so that few different sizes are recorded."""
        if plan.batch_size == self.full_batch:
            return m if self.in_c else rounded(m)
        return SHORT_STACK if self.is_recorded(plan.batch_size, plan.kind) else m

    def is_recorded(self, size: int, kind: Hashable) -> bool:
        """Whether steps on batches of this size, of samples of this kind, are recorded."""
        return size == self.full_batch or (size, kind) in self.frequent

    def parts(self, params: Stack, shared: list[Tensor], batch: list[Tensor]) -> tuple[Parts, Outline]:
        """Record a step on batches of this shape, once; it computes the flat gradient, losses and noted tensors."""
        counts = len(params), len(shared)

        def differentiate(*flat: Tensor) -> tuple[Tensor, ...]:
            params, rest = list(flat[: counts[0]]), list(flat[counts[0] :])
            gradients, losses, noted = self.loss(params, rest[: counts[1]], rest[counts[1] :])
            return (torch.cat([g.reshape(len(g), -1) for g in gradients], dim=1), losses, *noted)

        parts = self.graphs.parts(differentiate, params, shared, batch)
        if parts not in self._outlines:
            outline = self.loss.outline
            self.alone(params, shared, batch)  # raises if a parameter has no gradient; torch.func returns zeros for it
            self._outlines[parts] = outline
        return parts, self._outlines[parts]

    def alone(self, params: Stack, shared: list[Tensor], batch: list[Tensor]) -> tuple[Tensor, list[Tensor], Outline]:
        """Compute the same for the first client of a stack, without recording."""
        found, loss, noted = self.loss.alone([p[0] for p in params], shared, [part[0] for part in batch])
        self.check_gradients(found)
        flat = [(p.new_zeros(p[0].numel()) if g is None else g.reshape(-1)) for p, g in zip(params, found, strict=True)]
        return torch.cat(flat).unsqueeze(0), [t.unsqueeze(0) for t in (loss, *noted)], self.loss.outline

    def check_gradients(self, found: Sequence[Tensor | None]) -> None:
        """Refuse parameters without a gradient: an optimiser skips them, but may move a parameter with gradient zero.

        Whether a gradient exists depends on the shape of a batch alone, so every new shape is checked.
        """
        for name, gradient in zip(self.layout.names, found, strict=True):
            if gradient is None and not is_plain(self.trainer.optimizers[0]):
                raise UnfitError(f"{name} has no gradient, but the optimiser might move it")


class _Run:
    """The local steps of one stack, from its problem to its solutions.

    All parameters are views of one tensor ``x`` (m, d), which is changed in place.

    Args:
        ids: numbers of the clients in the log; results of further clients, which fill up the stack, are dropped.
    """

    def __init__(
        self, local: StackedLocal, problem: StackedProblem, plans: Sequence[Plan], ids: Sequence[int], log: StepLog
    ) -> None:
        self.local, self.problem, self.log = local, problem, log
        self.trainer, self.layout = local.trainer, local.layout
        self.optimizer = self.trainer.optimizers[0]
        self.plain = is_plain(self.optimizer) and not problem.mapped  # if so, one add_ on x replaces the optimiser
        self.in_c = self.plain and local.in_c and plans[0].batch_size == local.full_batch
        self.plans, self.ids, self.m, self.kind = plans, np.array(ids), len(plans), plans[0].kind
        self.x, self.constant = problem.start.clone(), problem.constant
        self.params = self._split(self.x)
        self.direction = Direction(self.trainer, problem.rho)
        self.shared = local.loss.shared()
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.totals = torch.zeros(self.m, dtype=torch.float64)
        self.counts = torch.zeros(self.m, dtype=torch.float64)

    def go(self) -> tuple[Tensor, Tensor]:
        """Take all steps; return the clients' final models (m, d) and mean losses (m,)."""
        with torch.inference_mode() if self.plain else torch.no_grad():
            batches = Batches(self.plans, self.trainer.precision_plugin.convert_input, self.x, self.local.scratch)
            if not self.in_c or not self._all_in_c(batches):
                self._side_by_side(batches)
        losses = (self.totals / self.counts)[: len(self.ids)]
        if not bool(torch.isfinite(losses).all()):
            raise FloatingPointError("a client's loss is not finite")
        return self.x[: len(self.ids)], losses

    def _split(self, rows: Tensor) -> Stack:
        """Split rows (m, d) into stacked parameters, which are views of the rows."""
        parts = torch.split(rows, [math.prod(shape) for shape in self.layout.shapes], dim=1)
        return [part.view(len(rows), *shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]

    def _note(self, outline: Outline, members: Numbers, steps: Numbers, size: int, results: Sequence[Tensor]) -> None:
        """Add the losses (K,) of K steps to the totals, and log their noted tensors by client and step number."""
        losses, *noted = results
        if len(real := np.flatnonzero(members < len(self.ids))) < len(members):
            chosen = torch.from_numpy(real)
            members, steps, losses = members[real], steps[real], losses[chosen]
            noted = [value[chosen] for value in noted]
        owners = torch.from_numpy(members)
        self.totals.index_add_(0, owners, losses.double().cpu() * size)
        self.counts.index_add_(0, owners, torch.full((len(members),), float(size), dtype=torch.float64))
        self.log.note(outline, self.ids[members], steps, size, noted)

    # Recorded steps: all clients take step t together.

    def _side_by_side(self, batches: Batches) -> None:
        size, length = batches.batch_size, batches.block
        if not self.plain:
            self.stacked_optimizer = stacked_optimizer(self.optimizer, self._by_parameter())
        for first in range(0, batches.steps, length):
            # the stack must keep its shape, so a client that has finished repeats a batch, and the step is undone
            steps = [_within(slice(first, first + length), plan.steps) for plan in self.plans]
            sizes = batches.sizes[:, first : min(first + length, batches.steps)].T  # (T, m); 0 for finished clients
            tensors = [part.view(self.m, length, *part.shape[1:]) for part in batches.take(steps)]
            alike = bool(((sizes == size) | (sizes == 0)).all())
            if alike and self.local.is_recorded(size, self.kind):
                self._full_batches(tensors, sizes, size, first)
            else:
                for t, own in enumerate(sizes):
                    step = [tensor[:, t] for tensor in tensors]
                    self._step_of_any_size(step, np.arange(self.m), own, np.full(self.m, first + t))

    def _full_batches(self, tensors: list[Tensor], sizes: Numbers, size: int, first: int) -> None:
        """Steps in which all unfinished clients have full batches; results of data alone are computed beforehand."""
        steps = len(sizes)
        data = [tensor.transpose(0, 1)[:steps] for tensor in tensors]
        parts, outline = self.local.parts(self.params, self.shared, [part[0] for part in data])
        prepared = parts.before(self.shared, data)
        fed, views, left = parts.fed(prepared), parts.views(*self.params), []
        for t, own in enumerate(zip(*(part.unbind() for part in fed), strict=True)):
            # views of parameters follow x, which changes in place; mapped points are new tensors in every step
            at = views if not self.problem.mapped else parts.views(*self._at(first + t))
            gradient, *rest = parts.step(*at, *self.shared, *own)
            self._advance(gradient, sizes[t])
            left.append(rest)
        results = parts.after([torch.stack(pieces) for pieces in zip(*left, strict=True)], self.shared, prepared)
        working = np.nonzero(sizes.T)  # ordered by client, then by step, as the log expects
        index = torch.from_numpy(working[1] * self.m + working[0])
        whole = len(index) == sizes.size
        flat = [result.transpose(0, 1).flatten(0, 1) if whole else result.flatten(0, 1)[index] for result in results]
        self._note(outline, working[0], working[1] + first, size, flat)

    def _step_of_any_size(self, batches: list[Tensor], place: Numbers, sizes: Numbers, steps: Numbers) -> None:
        """Compute gradients size by size, then take one step of all clients that have a batch.

        Args:
            batches: filled up to one size, (K, B, ...).
            place: index of each client's batch in ``batches``.
            sizes: sizes of the batches; 0 for clients without a batch.
            steps: numbers of these steps in the clients' visits.
        """
        gradient, at = torch.zeros_like(self.x), self._at(int(steps[0]))
        for size in np.unique(sizes[sizes > 0]).tolist():
            members = np.flatnonzero(sizes == size)
            for some in self._stacks_of(members, size):
                index = torch.from_numpy(place[some])
                batch = [part[index.to(part.device), :size] for part in batches]
                self._gradient_of(gradient, at, some, batch, steps)
        self._advance(gradient, sizes)

    def _stacks_of(self, members: Numbers, size: int) -> list[Numbers]:
        """Group members whose gradients are computed together, filled up with copies: few shapes are recorded."""
        if not self.local.is_recorded(size, self.kind):
            return [members[i : i + 1] for i in range(len(members))]
        width = min(rounded(len(members)), self.m) if size == self.local.full_batch else SHORT_STACK
        parts = [members[first : first + width] for first in range(0, len(members), width)]
        return [np.concatenate([part, part[:1].repeat(width - len(part))]) for part in parts]

    def _gradient_of(self, gradient: Tensor, at: Stack, members: Numbers, batch: list[Tensor], steps: Numbers) -> None:
        """Write the gradients of these members' batches, all of one size, into their rows of ``gradient``."""
        rows, size = torch.from_numpy(members).to(self.x.device), batch[0].shape[1]
        params = [p[rows] for p in at]
        if self.local.is_recorded(size, self.kind):
            parts, outline = self.local.parts(params, self.shared, batch)
            found, *results = parts.whole(*params, *self.shared, *batch)
        else:
            found, results, outline = self.local.alone(params, self.shared, batch)
        count = len(np.unique(members))  # members that fill up the stack repeat the first one
        gradient[rows[:count]] = found[:count]
        chosen = members[:count]
        self._note(outline, chosen, steps[chosen], size, [result[:count] for result in results])

    def _advance(self, gradient: Tensor, working: Numbers) -> None:
        """Take one step; rows of clients without a batch are restored, even if the step made them NaN."""
        if self.trainer.received_sigterm:
            raise SIGTERMException
        everybody = bool((working > 0).all())
        before = None if everybody else self.x.clone()
        direction = self.direction(gradient, self.x, self.constant)
        if self.plain:
            self.x.add_(direction, alpha=-self.lr)
        else:
            for p, own_gradient in zip(self.params, self._split(direction), strict=True):
                p.grad = own_gradient
            self.stacked_optimizer.step()
            for p, value in zip(self.params, self._mapped("after_step", self.lr), strict=True):
                p.copy_(value)
        if before is not None:
            active = torch.from_numpy(working > 0).to(self.x.device).unsqueeze(1)
            self.x.copy_(torch.where(active, self.x, before))

    def _at(self, step: int) -> Stack:
        """The points at which gradients are taken in a step."""
        return self._mapped("evaluate_at", step * self.lr)

    def _mapped(self, name: str, argument: float) -> Stack:
        maps: list[StepMap | None] = [getattr(asked, name) for asked in self.problem.mapped]
        if not any(maps):
            return self.params
        rows = zip(self.x, maps, strict=True)
        return self._split(torch.stack([x if map_ is None else map_(x, argument) for x, map_ in rows]))

    def _by_parameter(self) -> dict[int, Tensor]:
        named = dict(self.trainer.lightning_module.named_parameters())
        return {id(named[name]): p for name, p in zip(self.layout.names, self.params, strict=True)}

    # Steps in C: each client takes all its steps on full batches, one client after another.

    def _all_in_c(self, batches: Batches) -> bool:
        """Run full batches in C, and short ones as recorded steps in between; False, without a step, if no C code."""
        # clients meet their short batches at different steps, so each has its own number of steps done
        clients, done = np.arange(self.m), np.zeros(self.m, dtype=np.int64)
        while batches.sizes[clients, done].any():
            ahead = np.minimum(done[:, None] + np.arange(batches.block), batches.steps)
            full = batches.sizes[clients[:, None], ahead] == batches.batch_size
            lengths = np.cumprod(full, axis=1).sum(axis=1)  # number of full batches before the next short one
            if lengths.any():
                runs = [slice(at, at + length) for at, length in zip(done.tolist(), lengths.tolist(), strict=True)]
                if not self._in_c(batches.take(runs), done, lengths, batches.batch_size):
                    return False
                done += lengths
            self._short_batches(batches, done)
        return True

    def _short_batches(self, batches: Batches, done: Numbers) -> None:
        """Take one step of every client whose next batch is short."""
        due = batches.sizes[np.arange(self.m), done]
        sizes = np.where(due < batches.batch_size, due, 0)
        if sizes.any():
            taken = batches.take([slice(at, at + int(size > 0)) for at, size in zip(done.tolist(), sizes, strict=True)])
            self._step_of_any_size(taken, np.cumsum(sizes > 0) - 1, sizes, done.copy())
            done += sizes > 0

    def _in_c(self, data: list[Tensor], done: Numbers, lengths: Numbers, size: int) -> bool:
        """Take ``lengths`` steps of the clients in C, on batches (K, B, ...) ordered by client; False if no C code."""
        steps = [part.unsqueeze(1) for part in data]  # C code takes the steps of a stack of one client
        parts, outline = self.local.parts([p[:1] for p in self.params], self.shared, [part[0] for part in steps])
        prepared = parts.before(self.shared, steps)
        own = [self.x] if self.constant is None else [self.x, self.constant]
        # as tensors, because numbers would be compiled into the code, which then served one step size only
        numbers = [self.x.new_tensor(-self.lr), self.x.new_tensor(self.direction.rho)]
        given = own, [*self.shared, *numbers], parts.fed(prepared)
        code = self.local.graphs.in_c((parts, *self.direction.key), self._step(parts), lengths, *given)
        if code is None:  # the recorder has told the reason, which holds in later rounds too
            self.in_c = self.local.in_c = False
            return False
        if self.trainer.received_sigterm:
            raise SIGTERMException
        results = parts.after(code(*given, lengths, self.local.threads), self.shared, prepared)
        members = np.repeat(np.arange(self.m), lengths)
        numbered = np.concatenate([np.arange(at, at + count) for at, count in zip(done, lengths, strict=True)])
        self._note(outline, members, numbered, size, [result.squeeze(1) for result in results])
        return True

    def _step(self, parts: Parts) -> Function:
        """One step as a function of models, constants if there are any, shared tensors, minus the step size, the
        penalty's weight, and the inputs of the core; returns the next models and the core's other results."""
        constants, count = int(self.constant is not None), len(self.shared)

        def step(x: Tensor, *rest: Tensor) -> list[Tensor]:
            constant, shared, rest = rest[:constants], rest[constants:][:count], rest[constants + count :]
            descent, rho, *own = rest
            gradient, *left = parts.core(*parts.views(*self._split(x)), *shared, *own)
            return [x + descent * self.direction(gradient, x, constant[0] if constants else None, rho), *left]

        return step


def _within(steps: slice, count: int) -> Any:
    """Indices of the steps of a visit; steps after its end repeat the last one."""
    if steps.stop <= count:
        return steps
    return [min(step, count - 1) for step in range(steps.start, steps.stop)]
