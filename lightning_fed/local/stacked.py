"""Local work of many clients at once: one training step of a stack is one pass through a recorded graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any
from weakref import WeakKeyDictionary

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed._compat import SIGTERMException
from lightning_fed.attributes import fingerprint
from lightning_fed.core import StepMap
from lightning_fed.local.functional import Outline, StackedLoss, UnfitError
from lightning_fed.local.graphs import Graph, Graphs
from lightning_fed.local.parts import Parts
from lightning_fed.local.plan import Block, Blocks, Plan
from lightning_fed.local.questions import Answers, Questions
from lightning_fed.local.stack import Direction, Stack, is_plain, rounded, stacked_optimizer
from lightning_fed.local.step_log import StepLog
from lightning_fed.native.products import LANES
from lightning_fed.vector import Layout

#: Every so many stacks, this many samples of a block are looked at together.
CHECKED, POOL = 10, 256


class StackedLocal:
    """Answers the questions of many clients together, in the trainer's module.

    Args:
        layout: order of the parameters in ``x``; all of them are trained by the trainer's one optimiser.
        compile: let torch's compiler make machine code of recorded steps.
        in_c: write steps in C first, as far as they can be.
        threads: that share clients whose steps are written in C, if torch has not more.
    """

    def __init__(
        self, trainer: pl.Trainer, layout: Layout, compile: bool = False, in_c: bool = False, threads: int = 1
    ) -> None:
        self.trainer, self.layout, self.threads = trainer, layout, threads
        context = trainer.precision_plugin.train_step_context
        self.loss = StackedLoss(trainer.lightning_module, layout.names, context)
        self.graphs = Graphs(compile)
        self.in_c = in_c and layout.dtype in LANES and trainer.strategy.root_device.type == "cpu"
        self._outlines: WeakKeyDictionary[Parts, Outline] = WeakKeyDictionary()
        self._checked = 0
        self.given_up = False
        self.alike = True  # as long as all clients of a stack are known to do the same

    def give_up(self, error: Exception) -> None:
        """Clients that work one by one do not work as a stack: from the next round on, it is not tried again."""
        if not self.given_up:
            self.given_up = True
            warnings.warn(
                f"Clients cannot be trained side by side: {type(error).__name__}: {error}. From here on they are"
                " trained one by one.",
                stacklevel=2,
            )

    def solve(self, questions: Questions, plans: Sequence[Plan]) -> Answers:
        return _Run(self, questions, plans).go()

    def parts(self, params: Stack, shared: list[Tensor], data: list[Tensor]) -> tuple[Parts, Outline]:
        """A step on data of this shape: the flat gradient, losses, and what is logged, as the outline says."""
        counts = len(params), len(shared)

        def differentiate(*flat: Tensor) -> tuple[Tensor, ...]:
            params, rest = list(flat[: counts[0]]), list(flat[counts[0] :])
            weights, *batch = rest[counts[1] :]
            gradients, losses, noted = self.loss(params, rest[: counts[1]], batch, weights)
            return (torch.cat([g.reshape(len(g), -1) for g in gradients], dim=1), losses, *noted)

        parts = self.graphs.parts(fingerprint(self.trainer.lightning_module), differentiate, params, shared, data)
        return parts, self._outlines.setdefault(parts, self.loss.outline)

    def check(self, at: Stack, block: Block, losses: Tensor, clients: int) -> None:
        """Compare the first losses of one client, another one each time, with what the module says itself.

        A recorded step holds fast what it saw of the world, such as global variables.
        """
        i, self._checked = self._checked % clients, self._checked + 1
        with torch.inference_mode(False), torch.enable_grad():
            own = [part[i, : int(block.sizes[0, i])].clone() for part in block.batch(0)]
            expected = self.loss.alone([p[i].clone() for p in at], own).to(losses.dtype)
        tolerance = torch.finfo(losses.dtype).eps ** 0.6
        if not torch.isclose(losses[i], expected, rtol=tolerance, atol=tolerance, equal_nan=True):
            raise UnfitError("training_step gives another loss than when it was recorded")

    def check_mean(self, at: Stack, block: Block, clients: int) -> None:
        """Now and then, on a pool of samples of all clients, where one of them has come to."""
        if self._checked % CHECKED:
            return
        i = self._checked // CHECKED % clients
        with torch.inference_mode(False), torch.enable_grad():
            inside = (block.weights > 0).transpose(0, 1)
            count = int(inside.sum())
            rows = inside.flatten().nonzero().squeeze(1)[torch.linspace(0, count - 1, min(count, POOL)).long()]
            pool = [part[:, : block.steps].flatten(0, 2)[rows].clone() for part in block.tensors]
            if not self.loss.is_mean([p[i].clone() for p in at], pool):
                raise UnfitError("the loss of a batch is not the mean over its samples")

    def convert(self, batch: Any) -> Any:
        return self.trainer.precision_plugin.convert_input(batch)


class _Run:
    """The local steps of one stack, from its questions to its answers.

    All parameters are views of one tensor ``x`` (m, d), which is changed in place.
    """

    def __init__(self, local: StackedLocal, questions: Questions, plans: Sequence[Plan]) -> None:
        self.local, self.questions, self.plans = local, questions, plans
        self.trainer, self.layout = local.trainer, local.layout
        self.optimizer = self.trainer.optimizers[0]
        self.fused = is_plain(self.optimizer) and not questions.mapped
        self.in_c = self.fused and local.in_c
        self.m = len(plans) if self.in_c else rounded(len(plans))
        self.x = self._filled(questions.start)
        self.params = self._split(self.x)
        self.constant = None if questions.constant is None else self._filled(questions.constant)
        self.direction = Direction(self.trainer, questions.rho)
        self.shared = local.loss.shared()
        self.steps = torch.tensor([plan.steps for plan in plans] + [0] * (self.m - len(plans)))
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.log = StepLog()

    def go(self) -> Answers:
        done = 0
        totals = counts = torch.zeros(self.m, dtype=torch.float64, device=self.x.device)
        with torch.inference_mode() if self.fused else torch.no_grad():
            for block in Blocks(self.plans, self.m, self.local.convert, self.x):
                totals = totals + (self._block(block, done).double() * block.sizes).sum(0)
                counts = counts + block.sizes.sum(0)
                done += block.steps
        vars(self.optimizer)["_opt_called"] = True  # what schedulers look at before they step
        losses = (totals / counts)[: len(self.plans)]
        if not bool(torch.isfinite(losses).all()):
            raise FloatingPointError("a client's loss is not finite")
        return Answers(self.questions, self.x[: len(self.plans)], losses.tolist(), self.lr, self.log)

    def _filled(self, rows: Tensor) -> Tensor:
        """A copy of the rows; the first one fills the stack up."""
        return torch.cat([rows, rows[:1].expand(self.m - len(rows), -1)])

    def _split(self, rows: Tensor) -> Stack:
        """Rows of the layout as stacked parameters, which are views of them."""
        parts = torch.split(rows, [math.prod(shape) for shape in self.layout.shapes], dim=1)
        return [part.view(len(rows), *shape) for part, shape in zip(parts, self.layout.shapes, strict=True)]

    @property
    def _own(self) -> list[Tensor]:
        """What each client has for all its steps."""
        return [self.x] if self.constant is None else [self.x, self.constant]

    def _active(self, done: int, steps: int) -> Tensor | None:
        """Who is still at work in each of the next steps (T, m, 1); None if everybody is."""
        real = self.steps[: len(self.plans)]
        if bool((real >= done + steps).all()):
            return None
        return (torch.arange(done, done + steps).unsqueeze(1) < self.steps).unsqueeze(-1).to(self.x.device)

    def _block(self, block: Block, done: int) -> Tensor:
        """Losses (T, m) of the steps of a block."""
        start = [p.clone() for p in self._mapped("evaluate_at", 0.0)] if done == 0 else []
        results = self._in_c(block, done) if self.in_c else None
        outline, (losses, *noted) = results or self._side_by_side(block, done)
        if done == 0:
            self.local.check_mean(self.params, block, len(self.plans))
            self.local.check(start, block, losses[0], len(self.plans))
        self.log.note(block, outline, noted)
        return losses

    def _side_by_side(self, block: Block, done: int) -> tuple[Outline, list[Tensor]]:
        """Results (T, m, ...) of the steps of a block, each of which is taken by all clients at once."""
        data = [block.weights, *(tensor.transpose(0, 1)[: block.steps] for tensor in block.tensors)]
        parts, outline = self.local.parts(self.params, self.shared, [part[0] for part in data])
        prepared = parts.before(self.shared, data)
        advance = self._fused if self.fused else self._general
        left = advance(parts, parts.fed(prepared), done, block.steps)
        return outline, parts.after(left, self.shared, prepared)

    def _in_c(self, block: Block, done: int) -> tuple[Outline, list[Tensor]] | None:
        """The same by C code that goes from step to step and from client to client; None if there is none."""
        kinds = [block.weights.transpose(0, 1), *(tensor[:, : block.steps] for tensor in block.tensors)]
        data = [kind.flatten(0, 1).unsqueeze(1) for kind in kinds]  # of a stack of one, for m * T steps
        parts, outline = self.local.parts([p[:1] for p in self.params], self.shared, [part[0] for part in data])
        prepared = parts.before(self.shared, data)
        active = self._active(done, block.steps)
        lengths = self.x.new_full((len(data[0]),), -self.lr)
        if active is not None:
            lengths = lengths * active.squeeze(-1).t().flatten()
        given = self._own, self.shared, [lengths, *parts.fed(prepared)]
        code = self.local.graphs.in_c((parts, *self.direction.key), self._step(parts), *given)
        if code is None:
            self.in_c = self.local.in_c = False
            return None
        self._heed_signals()
        results = parts.after(code(*given, self.local.threads), self.shared, prepared)
        return outline, [r.reshape(self.m, block.steps, *r.shape[2:]).transpose(0, 1) for r in results]

    def _fused(self, parts: Parts, fed: Sequence[Tensor], done: int, steps: int) -> list[Tensor]:
        """Plain gradient steps on the question."""
        active, left = self._active(done, steps), []
        lengths = self.x.new_full((steps,), -self.lr) if active is None else active.to(self.x) * -self.lr
        lasting = [*self._own, *self.shared]
        compiled = self._compiled(parts, lasting, [lengths[0], *(part[0] for part in fed)])
        views = parts.views(*self.params)
        for length, *own in zip(lengths.unbind(), *(part.unbind() for part in fed), strict=True):
            self._heed_signals()
            if compiled is not None:
                left.append(compiled(*lasting, length, *own))
                continue
            gradient, *rest = parts.step(*views, *self.shared, *own)
            self.x.addcmul_(self.direction(gradient, self.x, self.constant), length)
            left.append(rest)
        return [torch.stack(pieces) for pieces in zip(*left, strict=True)]

    def _compiled(self, parts: Parts, lasting: Sequence[Tensor], varying: Sequence[Tensor]) -> Graph | None:
        """One step as machine code; None if that is not wanted or impossible."""
        moved = self._step(parts)

        def step(x: Tensor, *rest: Tensor) -> list[Tensor]:
            new, *left = moved(x, *rest)
            x.copy_(new)
            return left

        return self.local.graphs.compiled((parts, *self.direction.key), step, [*lasting, *varying])

    def _step(self, parts: Parts) -> Graph:
        """From models, constants if there are any, what is shared, lengths and what the core is fed, to the next models
        and what the core leaves."""
        constants, count = int(self.constant is not None), len(self.shared)

        def step(x: Tensor, *rest: Tensor) -> list[Tensor]:
            constant, shared, (length, *own) = rest[:constants], rest[constants:][:count], rest[constants + count :]
            gradient, *left = parts.core(*parts.views(*self._split(x)), *shared, *own)
            return [x + length * self.direction(gradient, x, constant[0] if constants else None), *left]

        return step

    def _general(self, parts: Parts, fed: Sequence[Tensor], done: int, steps: int) -> list[Tensor]:
        """Steps of any elementwise optimiser, which works on the stack as on one model; maps row by row."""
        active, left = self._active(done, steps), []
        if done == 0:
            self.stacked_optimizer = stacked_optimizer(self.optimizer, self._by_parameter())
        for t, own in enumerate(zip(*(part.unbind() for part in fed), strict=True)):
            self._heed_signals()
            at = self._mapped("evaluate_at", (done + t) * self.lr)
            gradient, *rest = parts.step(*parts.views(*at), *self.shared, *own)
            gradients = self._split(self.direction(gradient, self.x, self.constant))
            before = None if active is None else self.x.clone()
            for p, own_gradient in zip(self.params, gradients, strict=True):
                p.grad = own_gradient
            self.stacked_optimizer.step()
            for p, value in zip(self.params, self._mapped("after_step", self.lr), strict=True):
                p.copy_(value)
            if active is not None and before is not None:
                self.x.copy_(torch.where(active[t], self.x, before))
            left.append(rest)
        return [torch.stack(pieces) for pieces in zip(*left, strict=True)]

    def _heed_signals(self) -> None:
        if self.trainer.received_sigterm:
            raise SIGTERMException

    def _mapped(self, name: str, argument: float) -> Stack:
        maps: list[StepMap | None] = [getattr(asked, name) for asked in self.questions.mapped]
        if not any(maps):
            return self.params
        rows = zip(self.x, maps, strict=False)
        return self._split(self._filled(torch.stack([x if map_ is None else map_(x, argument) for x, map_ in rows])))

    def _by_parameter(self) -> dict[int, Tensor]:
        named = dict(self.trainer.lightning_module.named_parameters())
        return {id(named[name]): p for name, p in zip(self.layout.names, self.params, strict=True)}
