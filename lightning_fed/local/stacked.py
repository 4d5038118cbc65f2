"""Local work of many clients at once: one training step of a stack is one pass through a recorded graph."""

from __future__ import annotations

import copy
import math
from collections import defaultdict
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.optim import SGD, Optimizer
from torchmetrics import Metric

from lightning_fed._compat import SIGTERMException, is_param_in_hook_signature
from lightning_fed.core import Solution, StepMap
from lightning_fed.local.functional import Outline, Stack, StackedLoss, UnfitError
from lightning_fed.local.graphs import Graph, Graphs, fingerprint
from lightning_fed.local.plan import Block, Plan, blocks
from lightning_fed.vector import Layout

#: Clients in one stack: more gain nothing and take memory.
STACK = 256
#: Numbers in one parameter stack, for larger models.
STACK_NUMBERS = 2**20


@dataclass(frozen=True, eq=False)
class Question:
    """What one client is asked: see :meth:`~lightning_fed.core.Local.solve`."""

    start: Tensor
    linear: Tensor | None = None
    rho: float = 0.0
    center: Tensor | None = None
    after_step: StepMap | None = None
    evaluate_at: StepMap | None = None
    work: float = 1.0

    @property
    def constant(self) -> Tensor | None:
        """The part of the gradient of the question that does not depend on x."""
        if not self.rho or self.center is None:
            return self.linear
        return -self.rho * self.center if self.linear is None else self.linear - self.rho * self.center


class StackedLocal:
    """Answers the questions of many clients together, in the trainer's module.

    Args:
        layout: order of the parameters in ``x``; all of them are trained by the trainer's one optimiser.
        compile: turn recorded graphs into machine code.
    """

    def __init__(self, trainer: pl.Trainer, layout: Layout, compile: bool = False) -> None:
        module = trainer.lightning_module
        self.trainer, self.layout = trainer, layout
        self.loss = StackedLoss(
            module, layout.names, is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        )
        self.graphs = Graphs(compile)
        self._outlines: dict[Graph, Outline] = {}

    def solve(self, questions: Sequence[Question], plans: Sequence[Plan]) -> list[Solution]:
        rho = questions[0].rho
        if any(question.rho != rho for question in questions):
            raise UnfitError("clients of one round have different penalties")
        run = _Run(self, questions, plans, rho)
        run.go()
        return run.solutions()

    def graph(self, key: tuple[Hashable, ...], function: Graph, inputs: list[Tensor]) -> tuple[Graph, Outline]:
        """The function recorded for inputs of this shape, and what it logs."""
        graph = self.graphs.get((*key, fingerprint(self.trainer.lightning_module)), function, inputs)
        return graph, self._outlines.setdefault(graph, self.loss.outline)

    def convert(self, batch: Any) -> Any:
        return self.trainer.precision_plugin.convert_input(batch)


class _Run:
    """The local steps of one stack, from its questions to its answers."""

    def __init__(self, local: StackedLocal, questions: Sequence[Question], plans: Sequence[Plan], rho: float) -> None:
        self.local, self.questions, self.plans, self.rho = local, questions, plans, rho
        self.trainer, self.layout = local.trainer, local.layout
        self.m = rounded(len(questions))
        self.params = self._split([question.start for question in questions])
        constants = [question.constant for question in questions]
        self.constants = None
        if any(constant is not None for constant in constants):
            zero = torch.zeros_like(questions[0].start)
            self.constants = self._split([zero if constant is None else constant for constant in constants])
        self.optimizer = self.trainer.optimizers[0]
        self.steps = torch.tensor([plan.steps for plan in plans] + [0] * (self.m - len(plans)))
        self.totals = torch.zeros(self.m, dtype=torch.float64)
        self.counts = torch.zeros(self.m, dtype=torch.float64)
        self.lr = float(self.optimizer.param_groups[0]["lr"])
        self.log = _Log()

    def go(self) -> None:
        mapped = any(question.after_step or question.evaluate_at for question in self.questions)
        fused = is_plain(self.optimizer) and not mapped
        advance = self._fused if fused else self._general
        done = 0
        with torch.inference_mode() if fused else torch.no_grad():
            for block_of in blocks(self.plans, self.m, self.local.convert, self.params[0]):
                block = block_of()
                losses = advance(block, done)
                self.totals += (losses.double() * block.sizes).sum(0).cpu()
                self.counts += block.sizes.sum(0).cpu()
                done += len(block.sizes)
        if not bool(torch.isfinite(self.totals[: len(self.plans)]).all()):
            raise FloatingPointError("a client's loss is not finite")
        vars(self.optimizer)["_opt_called"] = True  # what schedulers look at before they step
        self.log.replay(self.trainer)

    def solutions(self) -> list[Solution]:
        x = torch.cat([part.reshape(self.m, -1) for part in self.params], dim=1)
        losses = (self.totals / self.counts).tolist()
        return [Solution(x[i], losses[i], plan.steps, plan.steps * self.lr) for i, plan in enumerate(self.plans)]

    def _split(self, vectors: list[Tensor]) -> Stack:
        """Vectors of the layout as stacked parameters; the first one fills the stack up."""
        stack = torch.stack(vectors + [vectors[0]] * (self.m - len(vectors)))
        parts = torch.split(stack, [math.prod(shape) for shape in self.layout.shapes], dim=1)
        return [part.reshape(self.m, *shape).clone() for part, shape in zip(parts, self.layout.shapes, strict=True)]

    def _active(self, done: int, steps: int) -> Tensor | None:
        """Who is still at work in each of the next steps (T, m); None if everybody is."""
        real = self.steps[: len(self.plans)]
        if bool((real >= done + steps).all()):
            return None
        return torch.arange(done, done + steps).unsqueeze(1) < self.steps

    def _fused(self, block: Block, done: int) -> Tensor:
        """Plain gradient steps on the question, each one graph from parameters to parameters."""
        like = self.params[0]
        active = self._active(done, len(block.sizes))
        lengths = like.new_tensor(self.lr).expand(len(block.sizes)) if active is None else active.to(like) * self.lr
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
            moved = [p - _like(length, p) * g for p, g in zip(params, gradients, strict=True)]
            return (*moved, losses, *noted)

        def inputs(t: int) -> list[Tensor]:
            batch = [part[t] for part in block.batch]
            return [*self.params, *shared, *(self.constants or []), lengths[t], block.weights[t], *batch]

        key = ("step", rho, self.trainer.gradient_clip_val, self.trainer.gradient_clip_algorithm, groups)
        graph, outline = self.local.graph(key, step, inputs(0))
        losses = []
        for t in range(len(block.sizes)):
            self._heed_signals()
            out = graph(*inputs(t))
            self.params = list(out[:count])
            losses.append(out[count])
            self.log.note(out[count + 1 :])
        self.log.close(block, outline)
        return torch.stack(losses)

    def _general(self, block: Block, done: int) -> Tensor:
        """Steps of any elementwise optimiser, which works on the stack as on one model; maps row by row."""
        active = self._active(done, len(block.sizes))
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
            return [*at, *shared, block.weights[t], *(part[t] for part in block.batch)]

        graph, outline = self.local.graph(("gradient", len(shared)), differentiate, inputs(0, self.params))
        losses = []
        for t in range(len(block.sizes)):
            self._heed_signals()
            out = graph(*inputs(t, self._mapped("evaluate_at", (done + t) * self.lr)))
            gradients = augmented(list(out[:count]), self.params, self.constants, self.rho)
            gradients = gradients if clip is None else clip(gradients)
            before = None if active is None else [p.clone() for p in self.params]
            for p, gradient in zip(self.params, gradients, strict=True):
                p.grad = gradient
            self.stacked_optimizer.step()
            self._write(self._mapped("after_step", self.lr))
            if active is not None and before is not None:
                self._write([torch.where(_like(active[t], p), p, b) for p, b in zip(self.params, before, strict=True)])
            losses.append(out[count])
            self.log.note(out[count + 1 :])
        self.log.close(block, outline)
        return torch.stack(losses)

    def _heed_signals(self) -> None:
        if self.trainer.received_sigterm:
            raise SIGTERMException

    def _mapped(self, name: str, argument: float) -> Stack:
        maps: list[StepMap | None] = [getattr(question, name) for question in self.questions]
        if not any(maps):
            return self.params
        x = torch.cat([part.reshape(self.m, -1) for part in self.params], dim=1)
        return self._split([x[i] if map_ is None else map_(x[i], argument) for i, map_ in enumerate(maps)])

    def _write(self, values: Stack) -> None:
        if values is not self.params:
            for p, value in zip(self.params, values, strict=True):
                p.copy_(value)

    def _by_parameter(self) -> dict[int, Tensor]:
        named = dict(self.trainer.lightning_module.named_parameters())
        return {id(named[name]): p for name, p in zip(self.layout.names, self.params, strict=True)}


class _Log:
    """What the steps of a stack logged, handed to Lightning once per stack as sample-weighted means."""

    def __init__(self) -> None:
        self._noted: list[Sequence[Tensor]] = []
        self._sums: dict[str, float] = defaultdict(float)
        self._samples = 0
        self._updates: list[tuple[Metric, list[Tensor]]] = []
        self._outline: Outline | None = None

    def note(self, out: Sequence[Tensor]) -> None:
        self._noted.append(out)

    def close(self, block: Block, outline: Outline) -> None:
        """Sum up the steps of a block."""
        self._outline, inside = outline, block.weights > 0
        noted = iter([torch.stack(parts)[inside] for parts in zip(*self._noted, strict=True)])
        self._noted = []
        self._samples += int(inside.sum())
        for name in outline.computed:
            self._sums[name] += float(next(noted).double().sum())
        for metric, count in outline.updates:
            self._updates.append((metric, [next(noted).flatten(0, 1) for _ in range(count)]))

    def replay(self, trainer: pl.Trainer) -> None:
        module, outline = trainer.lightning_module, self._outline
        module._current_fx_name = "training_step"
        for metric, args in self._updates:
            metric.update(*args)
        for name, (known, kwargs) in outline.logged.items() if outline else ():
            value = self._sums[name] / self._samples if known is None else known
            module.log(name, value, batch_size=self._samples, **kwargs)


def rounded(m: int) -> int:
    """Size of the stack for m clients: few different ones, since each is a graph of its own; at most an eighth more.

    >>> [rounded(m) for m in (1, 10, 17, 250)]
    [1, 10, 18, 256]
    """
    step: int = max(1, 1 << m.bit_length() >> 4)
    return -(-m // step) * step


def augmented(gradients: Stack, params: Stack, constants: Stack | None, rho: float) -> Stack:
    """The gradients of the question."""
    if rho:
        gradients = [torch.add(g, p, alpha=rho) for g, p in zip(gradients, params, strict=True)]
    if constants is None:
        return gradients
    return [g + c for g, c in zip(gradients, constants, strict=True)]


def clipping(trainer: pl.Trainer) -> Callable[[Stack], Stack] | None:
    """The trainer's gradient clipping, for each client of a stack."""
    limit = trainer.gradient_clip_val
    if not limit:
        return None
    if trainer.gradient_clip_algorithm == "value":
        return lambda gradients: [g.clamp(-limit, limit) for g in gradients]

    def by_norm(gradients: Stack) -> Stack:
        norm = torch.stack([g.flatten(1).norm(dim=1) for g in gradients]).norm(dim=0)
        factor = (limit / (norm + 1e-6)).clamp(max=1.0)
        return [g * _like(factor, g) for g in gradients]

    return by_norm


def is_plain(optimizer: Optimizer) -> bool:
    """Whether its steps are ``x - lr * gradient`` with one lr."""
    groups = optimizer.param_groups
    plain = type(optimizer) is SGD and len({float(group["lr"]) for group in groups}) == 1
    return plain and not any(group["momentum"] or group["weight_decay"] or group["maximize"] for group in groups)


def stacked_optimizer(optimizer: Optimizer, stacked: dict[int, Tensor]) -> Optimizer:
    """The same optimiser without memory, on stacked parameters instead of its own, which are given by their ids."""
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    twin.param_groups = [
        {**group, "params": [stacked[id(p)] for p in group["params"] if id(p) in stacked]}
        for group in optimizer.param_groups
    ]
    return twin


def _like(per_client: Tensor, p: Tensor) -> Tensor:
    return per_client if per_client.ndim == 0 else per_client.view(-1, *(1 for _ in p.shape[1:]))
