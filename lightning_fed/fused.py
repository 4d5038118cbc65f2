"""Plain gradient steps of large models with as little memory traffic as possible.

A step of SGD on the question is ``x <- lerp(x, centre - linear / rho, lr * rho) - lr * gradient``, done in place. The
gradient of a large linear layer's weight is a product of two small matrices; it is never formed, but multiplied into
the weight: for small batches in the same pass that takes the gradient of the layer's inputs. On a CPU, where a step of
the FEMNIST network waits for memory, that saves half of its time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed.lean import LeanStep
from lightning_fed.local.module import AugmentedGradient, check_dense
from lightning_fed.local.stack import is_plain
from lightning_fed.native import linear

#: Models with fewer parameters gain nothing.
LARGE_MODEL = 2**18
#: Weights with fewer entries gain nothing.
LARGE_WEIGHT = 2**18


class Factors:
    """Collects what gradients of weights are products of: the gradients of layers' outputs, and their inputs."""

    def __init__(self) -> None:
        self.found: list[tuple[nn.Linear, Tensor, Tensor]] = []

    def take(self, layer: nn.Linear, slopes: Tensor, inputs: Tensor, wanted: bool) -> Tensor | None:
        """Gives the gradient of the inputs, if it is ``wanted``."""
        self.found.append((layer, slopes, inputs))
        return slopes @ layer.weight if wanted else None


class Moves(Factors):
    """Moves weights as their gradients' factors come, where a layer is used once in a batch.

    Args:
        pulls: the points that the question draws weights to, or its linear terms.
    """

    def __init__(self, pulls: Mapping[Tensor, Tensor]) -> None:
        super().__init__()
        self.pulls = pulls
        self.uses: Counter[nn.Linear] = Counter()
        self.moved: set[Tensor] = set()
        self.numbers: tuple[float, float, float] | None = None
        self._needed: set[Tensor] = set()

    def begin(self) -> None:
        """A new batch."""
        self.found.clear()
        self.uses.clear()
        self.moved.clear()

    @contextmanager
    def moving(self, loss: Tensor, keep: float, pull: float, lr: float) -> Iterator[None]:
        """While it lasts, a factor that comes is that of the loss itself; see :func:`linear.backward`."""
        self.found.clear()  # those of gradients that the step asked for
        self.numbers = keep, pull, lr
        self._needed = leaves_of(loss)  # a weight among them is looked at in another way too, such as by a penalty
        try:
            yield
        finally:
            self.numbers = None

    def take(self, layer: nn.Linear, slopes: Tensor, inputs: Tensor, wanted: bool) -> Tensor | None:
        once = self.uses[layer] == 1 and layer.weight not in self._needed
        if self.numbers is None or not once or not linear.is_possible(layer.weight, inputs):
            return super().take(layer, slopes, inputs, wanted)
        self.moved.add(layer.weight)
        return linear.backward(layer.weight, self.pulls.get(layer.weight), inputs, slopes, *self.numbers)


class _Linear(torch.autograd.Function):
    """A linear map that hands over the two factors of its weight's gradient in place of the gradient.

    ``anchor`` makes the result differentiable; the weight is no input of it.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, bias: Tensor | None, anchor: Tensor, layer: nn.Linear, factors: Factors) -> Tensor:
        weight = layer.weight.detach()
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.factors, ctx.has_bias = layer, factors, bias is not None
        rows = x.reshape(-1, x.shape[-1])
        if not linear.is_possible(weight, rows):
            return nn.functional.linear(x, weight, bias)
        y = linear.forward(weight, rows).view(*x.shape[:-1], -1)
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, _ = ctx.saved_tensors  # an error, should the weight have changed
        rows = slope.reshape(-1, slope.shape[-1])
        towards_x = ctx.factors.take(ctx.layer, rows, x.reshape(-1, x.shape[-1]), ctx.needs_input_grad[0])
        of_bias = rows.sum(0) if ctx.has_bias else None
        return None if towards_x is None else towards_x.view(x.shape), of_bias, None, None, None


def large_layers(module: nn.Module) -> list[nn.Linear]:
    """The linear layers whose weights are worth it, and are nobody else's."""
    owners: dict[int, int] = {}
    for part in module.modules():
        for p in part.parameters(recurse=False):
            owners[id(p)] = owners.get(id(p), 0) + 1
    return [
        part
        for part in module.modules()
        if type(part) is nn.Linear
        and part.weight.requires_grad
        and part.weight.numel() >= LARGE_WEIGHT
        and owners.get(id(part.weight)) == 1  # a pruned or normalised weight is computed, and nobody's parameter
        and "forward" not in vars(part)
    ]


def leaves_of(loss: Tensor) -> set[Tensor]:
    """The tensors whose gradients a backward pass would collect.

    >>> w, x = torch.ones(2, requires_grad=True), torch.ones(2)
    >>> leaves_of((w * x).sum()) == {w}
    True
    """
    found, seen, waiting = set[Tensor](), set[Any](), [loss.grad_fn]
    while waiting:
        node: Any = waiting.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if type(node).__name__ == "AccumulateGrad":
            found.add(node.variable)
        waiting.extend(before for before, _ in node.next_functions)
    return found


@contextmanager
def factored(layers: Collection[nn.Linear], factors: Factors) -> Iterator[None]:
    """While it lasts, these layers give factors of their weights' gradients, and no gradients of their weights."""
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer, factors)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward(layer: nn.Linear, factors: Factors, x: Tensor) -> Tensor:
    weight = layer.weight
    heard = weight._backward_hooks or weight._post_accumulate_grad_hooks
    if not torch.is_grad_enabled() or not weight.requires_grad or heard:
        return nn.functional.linear(x, weight, layer.bias)
    if isinstance(factors, Moves):
        factors.uses[layer] += 1
    out: Tensor = _Linear.apply(x, layer.bias, weight.new_empty(0, requires_grad=True), layer, factors)
    return out


def is_possible(trainer: pl.Trainer) -> bool:
    """Whether local steps are plain gradient steps of a large model."""
    size = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
    optimizer = trainer.optimizers[0]
    listened = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    parting = len(optimizer.param_groups) > 1 and any(c.interval == "step" for c in trainer.lr_scheduler_configs)
    plain = is_plain(optimizer) and not trainer.gradient_clip_val and not listened and not parting
    return plain and size >= LARGE_MODEL and type(trainer.precision_plugin).__name__ in ("Precision", "DoublePrecision")


class FusedStep(LeanStep):
    """One local step: ``training_step``, backward, and one update in place.

    Args:
        layers: whose weights' gradients are not formed.
    """

    def __init__(
        self, trainer: pl.Trainer, question: AugmentedGradient, wants_index: bool, layers: Collection[nn.Linear]
    ) -> None:
        super().__init__(trainer, question, wants_index)
        self.params: list[Any] = [p for group in self.optimizer.param_groups for p in group["params"]]
        trained = set(self.params)
        self.layers = [layer for layer in layers if layer.weight in trained]
        self.pulls = question.pulls(self.params)
        self.moves = Moves(self.pulls)

    def __call__(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.module._current_fx_name = "training_step"
        self.moves.begin()
        with factored(self.layers, self.moves), self.trainer.precision_plugin.train_step_context():
            output: Any = self.module.training_step(*((batch, batch_idx) if self.wants_index else (batch,)))
            loss = output["loss"] if isinstance(output, Mapping) else output
            self.optimizer.zero_grad()
            lr = float(self.optimizer.param_groups[0]["lr"])
            strength = lr * self.question.rho
            keep, pull = (1 - strength, strength) if self.question.rho else (1.0, -lr)
            if isinstance(loss, Tensor):
                with self.moves.moving(loss, keep, pull, lr):
                    loss.backward()  # type: ignore[no-untyped-call]
        self._update(lr)
        return {} if loss is None else {"loss": loss.detach()}

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        """Move the parameters that have not moved yet."""
        moves = self.moves
        params = [p for p in self.params if p.requires_grad]
        sloping = [p for p in params if p.grad is not None]
        if not sloping and not moves.found and not moves.moved:
            return  # a batch without a loss makes no step
        if self.pulls:
            check_dense(sloping)
            rest = [p for p in params if p in self.pulls and p not in moves.moved]
            pulls = [self.pulls[p] for p in rest]
            if self.question.rho:
                torch._foreach_lerp_(rest, pulls, lr * self.question.rho)
            else:
                torch._foreach_add_(rest, pulls, alpha=-lr)
        if sloping:
            torch._foreach_add_(sloping, [p.grad for p in sloping], alpha=-lr)
        for layer, slopes, inputs in moves.found:
            layer.weight.addmm_(slopes.t(), inputs, alpha=-lr)
        vars(self.optimizer)["_opt_called"] = True  # what schedulers look at before they step
        self.question.lr_sum += lr
