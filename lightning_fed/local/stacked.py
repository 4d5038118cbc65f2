"""Local work of many clients at once: one training step of a stack is one pass through a recorded graph."""

from __future__ import annotations

import math
import warnings
from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from lightning_fed._compat import SIGTERMException
from lightning_fed.attributes import fingerprint
from lightning_fed.core import Question, StepMap
from lightning_fed.local.functional import Outline, StackedLoss, UnfitError
from lightning_fed.local.graphs import Graph, Graphs
from lightning_fed.local.plan import Block, Blocks, Plan
from lightning_fed.local.stack import Stack, augmented, clipping, is_plain, per_client, rounded, stacked_optimizer
from lightning_fed.local.step_log import StepLog
from lightning_fed.vector import Layout


@dataclass(frozen=True, eq=False)
class Asked:
    """What one client is asked: see :meth:`~lightning_fed.core.Local.solve`."""

    start: Tensor
    question: Question
    after_step: StepMap | None = None
    evaluate_at: StepMap | None = None


@dataclass(frozen=True, eq=False)
class Questions:
    """What the clients of a stack are asked: starts and constants (m, d), and maps of their own, if they have any."""

    start: Tensor
    constant: Tensor | None
    rho: float
    mapped: Sequence[Asked] = ()

    @classmethod
    def of(cls, asked: Sequence[Asked]) -> Questions:
        rho = asked[0].question.rho
        if any(each.question.rho != rho for each in asked):
            raise UnfitError("clients of one round have different penalties")
        constants = [each.question.constant for each in asked]
        constant = None
        if any(c is not None for c in constants):
            zero = torch.zeros_like(asked[0].start)
            constant = torch.stack([zero if c is None else c for c in constants])
        mapped = any(each.after_step or each.evaluate_at for each in asked)
        return cls(torch.stack([each.start for each in asked]), constant, rho, asked if mapped else ())

    def __getitem__(self, i: int) -> Question:
        """One of them, up to a constant."""
        return Question(None if self.constant is None else self.constant[i], self.rho)


@dataclass(frozen=True, eq=False)
class Answers:
    """Where the clients of a stack ended, (m, d), their mean losses, and what they logged."""

    questions: Questions
    x: Tensor
    losses: list[float]
    lr: float
    log: StepLog


class StackedLocal:
    """Answers the questions of many clients together, in the trainer's module.

    Args:
        layout: order of the parameters in ``x``; all of them are trained by the trainer's one optimiser.
        compile: turn recorded graphs into machine code.
    """

    def __init__(self, trainer: pl.Trainer, layout: Layout, compile: bool = False) -> None:
        self.trainer, self.layout = trainer, layout
        self.loss = StackedLoss(trainer.lightning_module, layout.names)
        self.graphs = Graphs(compile)
        self._outlines: dict[Graph, Outline] = {}
        self._checked = 0
        self.given_up = False
        self.alike = True  # as long as all clients of a stack are known to do the same

    def give_up(self, error: Exception) -> None:
        """Clients that work one by one do not work as a stack: from the next round on, it is not tried again."""
        if not self.given_up:
            self.given_up = True
            warnings.warn(
                f"Clients could not be trained side by side: {type(error).__name__}: {error}. From here on they are"
                " trained one by one, with the same results.",
                stacklevel=2,
            )

    def solve(self, questions: Questions, plans: Sequence[Plan]) -> Answers:
        return _Run(self, questions, plans).go()

    def graph(self, key: tuple[Hashable, ...], function: Graph, inputs: list[Tensor]) -> tuple[Graph, Outline]:
        """The function recorded for inputs of this shape, and what it logs."""
        graph = self.graphs.get((*key, fingerprint(self.trainer.lightning_module)), function, inputs)
        return graph, self._outlines.setdefault(graph, self.loss.outline)

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

    def convert(self, batch: Any) -> Any:
        return self.trainer.precision_plugin.convert_input(batch)


class _Run:
    """The local steps of one stack, from its questions to its answers."""

    def __init__(self, local: StackedLocal, questions: Questions, plans: Sequence[Plan]) -> None:
        self.local, self.questions, self.plans, self.rho = local, questions, plans, questions.rho
        self.trainer, self.layout = local.trainer, local.layout
        self.m = rounded(len(plans))
        self.params = self._split(questions.start)
        self.constants = None if questions.constant is None else self._split(questions.constant)
        self.optimizer = self.trainer.optimizers[0]
        self.steps = torch.tensor([plan.steps for plan in plans] + [0] * (self.m - len(plans)))
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.log = StepLog()

    def go(self) -> Answers:
        fused = is_plain(self.optimizer) and not self.questions.mapped
        advance = self._fused if fused else self._general
        done = 0
        totals = counts = torch.zeros(self.m, dtype=torch.float64, device=self.params[0].device)
        with torch.inference_mode() if fused else torch.no_grad():
            for block in Blocks(self.plans, self.m, self.local.convert, self.params[0]):
                totals = totals + (advance(block, done).double() * block.sizes).sum(0)
                counts = counts + block.sizes.sum(0)
                done += block.steps
        vars(self.optimizer)["_opt_called"] = True  # what schedulers look at before they step
        losses = (totals / counts)[: len(self.plans)]
        if not bool(torch.isfinite(losses).all()):
            raise FloatingPointError("a client's loss is not finite")
        return Answers(self.questions, self._joined()[: len(self.plans)], losses.tolist(), self.lr, self.log)

    def _split(self, rows: Tensor) -> Stack:
        """Rows of the layout as stacked parameters; the first one fills the stack up."""
        if len(rows) < self.m:
            rows = torch.cat([rows, rows[:1].expand(self.m - len(rows), -1)])
        parts = torch.split(rows, [math.prod(shape) for shape in self.layout.shapes], dim=1)
        return [part.reshape(self.m, *shape).clone() for part, shape in zip(parts, self.layout.shapes, strict=True)]

    def _joined(self) -> Tensor:
        return torch.cat([part.reshape(self.m, -1) for part in self.params], dim=1)

    def _active(self, done: int, steps: int) -> Tensor | None:
        """Who is still at work in each of the next steps (T, m); None if everybody is."""
        real = self.steps[: len(self.plans)]
        if bool((real >= done + steps).all()):
            return None
        return torch.arange(done, done + steps).unsqueeze(1) < self.steps

    def _fused(self, block: Block, done: int) -> Tensor:
        """Plain gradient steps on the question, each one graph from parameters to parameters."""
        like = self.params[0]
        active = self._active(done, block.steps)
        lengths = like.new_tensor(self.lr).expand(block.steps) if active is None else active.to(like) * self.lr
        shared = self.local.loss.shared()
        loss, rho, clip = self.local.loss, self.rho, clipping(self.trainer)
        count, groups = len(self.params), (len(shared), 0 if self.constants is None else len(self.params))

        def step(*flat: Tensor) -> tuple[Tensor, ...]:
            params, rest = list(flat[:count]), list(flat[count:])
            shared, constants = rest[: groups[0]], rest[groups[0] : sum(groups)]
            length, weights, *batch = rest[sum(groups) :]
            gradients, losses, noted = loss(params, shared, batch, weights)
            gradients = augmented(gradients, params, constants or None, rho)
            if clip is not None:
                gradients = clip(gradients)
            moved = [p - per_client(length, p) * g for p, g in zip(params, gradients, strict=True)]
            return (*moved, losses, *noted)

        def inputs(t: int) -> list[Tensor]:
            return [*self.params, *shared, *(self.constants or []), lengths[t], block.weights[t], *block.batch(t)]

        key = ("step", rho, self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm, groups)
        graph, outline = self.local.graph(key, step, inputs(0))
        losses = []
        for t in range(block.steps):
            self._heed_signals()
            out = graph(*inputs(t))
            if done + t == 0:
                self.local.check(self.params, block, out[count], len(self.plans))
            self.params = list(out[:count])
            losses.append(out[count])
            self.log.note(out[count + 1 :])
        self.log.close(block, outline)
        return torch.stack(losses)

    def _general(self, block: Block, done: int) -> Tensor:
        """Steps of any elementwise optimiser, which works on the stack as on one model; maps row by row."""
        active = self._active(done, block.steps)
        if done == 0:
            self.stacked_optimizer = stacked_optimizer(self.optimizer, self._by_parameter())
        shared, clip = self.local.loss.shared(), clipping(self.trainer)
        count, loss = len(self.params), self.local.loss

        def differentiate(*flat: Tensor) -> tuple[Tensor, ...]:
            params, rest = list(flat[:count]), list(flat[count:])
            weights, *batch = rest[len(shared) :]
            gradients, losses, noted = loss(params, rest[: len(shared)], batch, weights)
            return (*gradients, losses, *noted)

        def inputs(t: int, at: Stack) -> list[Tensor]:
            return [*at, *shared, block.weights[t], *block.batch(t)]

        graph, outline = self.local.graph(("gradient", len(shared)), differentiate, inputs(0, self.params))
        losses = []
        for t in range(block.steps):
            self._heed_signals()
            at = self._mapped("evaluate_at", (done + t) * self.lr)
            out = graph(*inputs(t, at))
            if done + t == 0:
                self.local.check(at, block, out[count], len(self.plans))
            gradients = augmented(list(out[:count]), self.params, self.constants, self.rho)
            gradients = gradients if clip is None else clip(gradients)
            before = None if active is None else [p.clone() for p in self.params]
            for p, gradient in zip(self.params, gradients, strict=True):
                p.grad = gradient
            self.stacked_optimizer.step()
            self._write(self._mapped("after_step", self.lr))
            if active is not None and before is not None:
                self._write(
                    [torch.where(per_client(active[t], p), p, b) for p, b in zip(self.params, before, strict=True)]
                )
            losses.append(out[count])
            self.log.note(out[count + 1 :])
        self.log.close(block, outline)
        return torch.stack(losses)

    def _heed_signals(self) -> None:
        if self.trainer.received_sigterm:
            raise SIGTERMException

    def _mapped(self, name: str, argument: float) -> Stack:
        maps: list[StepMap | None] = [getattr(asked, name) for asked in self.questions.mapped]
        if not any(maps):
            return self.params
        rows = zip(self._joined(), maps, strict=False)
        return self._split(torch.stack([x if map_ is None else map_(x, argument) for x, map_ in rows]))

    def _write(self, values: Stack) -> None:
        if values is not self.params:
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)

    def _by_parameter(self) -> dict[int, Tensor]:
        named = dict(self.trainer.lightning_module.named_parameters())
        return {id(named[name]): p for name, p in zip(self.layout.names, self.params, strict=True)}
