"""Plain gradient steps of large models with as little memory traffic as possible.

A step of SGD on a problem is ``x <- lerp(x, centre - linear / rho, lr * rho) - lr * gradient``, done in place. The
gradient of a large linear layer's weight is a product of two small matrices; it is not formed, but multiplied into the
weight after the backward pass. On a CPU, where memory limits a step of the FEMNIST network, that saves much of its
time. The numbers are right for every use of a weight: autograd forms the gradient of uses outside the layer.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from lightning_fed.lightning import pl
from lightning_fed.local.augmented_gradient import AugmentedGradient, check_dense
from lightning_fed.local.native import linear
from lightning_fed.local.steps.hookless import LeanStep

#: Minimum number of entries of a weight whose gradient is kept in factors; smaller weights do not gain.
LARGE_WEIGHT = 2**18


class Factors:
    """Collects the factors of weights' gradients: gradients of layers' outputs, and the layers' inputs.

    Collects only during the backward pass of a batch's loss. A pass inside a training step or inside that pass (a
    penalty on gradients, a checkpoint) is another task of autograd, which forms its gradients.
    """

    def __init__(self) -> None:
        self.found: dict[nn.Linear, list[tuple[Tensor, Tensor]]] = defaultdict(list)
        self._task: int | None = None

    @property
    def collecting(self) -> bool:
        return self._task is not None and self._task == torch._C._current_graph_task_id()

    @contextmanager
    def collected(self, loss: Tensor) -> Iterator[None]:
        """Collect the factors of ``loss.backward()`` inside a with block."""
        self.found.clear()
        graph: Any = loss
        # the hook of the loss runs before all others of its backward pass, so it can note the task's id
        hook = graph.register_hook(self._begin) if graph.requires_grad else None
        try:
            yield
        finally:
            self._task = None
            if hook is not None:
                hook.remove()

    def _begin(self, _: Tensor) -> None:
        self._task = torch._C._current_graph_task_id()


class _Linear(torch.autograd.Function):
    """A linear map that passes the two factors of its weight's gradient to ``factors`` while they are collected."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, factors: Factors) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.factors, ctx.has_bias = layer, factors, bias is not None
        rows = x.reshape(-1, x.shape[-1])
        if not linear.is_for_c(weight, rows):
            return nn.functional.linear(x, weight, bias)
        y = linear.forward(weight, rows)
        if y._is_view() or x.ndim != 2:  # autograd refuses in-place operators, such as ReLU(inplace), on a view
            y = y.view(*x.shape[:-1], -1).clone()
        return y if bias is None else y.add_(bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows, inputs = slope.reshape(-1, slope.shape[-1]), x.reshape(-1, x.shape[-1])
        of_x = of_weight = None
        if ctx.needs_input_grad[0]:
            in_c = not torch.is_grad_enabled() and linear.is_for_c(weight, rows)
            of_x = (linear.backward(weight, rows) if in_c else rows @ weight).view(x.shape)
        if ctx.factors.collecting:
            ctx.factors.found[ctx.layer].append((rows, inputs))
        else:
            of_weight = rows.t() @ inputs
        return of_x, of_weight, rows.sum(0) if ctx.has_bias else None, None, None


def large_layers(module: nn.Module) -> list[nn.Linear]:
    """Linear layers whose weights are large and not shared; none if a part of the module is compiled by torch."""
    if any(isinstance(part, torch._dynamo.OptimizedModule) for part in module.modules()):
        return []
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
        and owners.get(id(part.weight)) == 1  # a pruned or normalised weight is computed, hence not a parameter
        and "forward" not in vars(part)
    ]


@contextmanager
def factored(layers: Collection[nn.Linear], factors: Factors) -> Iterator[None]:
    """Replace the layers' forward inside a with block by one that passes factors of gradients to ``factors``."""
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer, factors)
    try:
        yield
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward(layer: nn.Linear, factors: Factors, x: Tensor) -> Tensor:
    weight = layer.weight
    if not _is_ordinary(x, weight):
        return nn.functional.linear(x, weight, layer.bias)
    out: Tensor = _Linear.apply(x, weight, layer.bias, layer, factors)
    return out


def _is_ordinary(x: Tensor, weight: Tensor) -> bool:
    """Whether only autograd observes this call: no hook, transform, forward derivative or automatic precision."""
    if not torch.is_grad_enabled() or not weight.requires_grad:
        return False
    if weight._backward_hooks or weight._post_accumulate_grad_hooks:
        return False
    other = torch._C._functorch.peek_interpreter_stack() is not None or torch.is_autocast_enabled("cpu")
    dual = torch.autograd.forward_ad._current_level >= 0
    return type(x) is Tensor and x.dtype == weight.dtype and not other and not dual


class FusedStep(LeanStep):
    """One local step: ``training_step``, backward, and one update in place."""

    def __init__(self, trainer: pl.Trainer, augmented: AugmentedGradient, wants_index: bool) -> None:
        super().__init__(trainer, augmented, wants_index)
        self.params: list[Any] = [p for group in self.optimizer.param_groups for p in group["params"]]
        trained = set(self.params)
        self.layers = [layer for layer in large_layers(self.module) if layer.weight in trained]
        self.pulls = augmented.pulls(self.params)
        self.factors = Factors()

    def __call__(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        with factored(self.layers, self.factors):
            return super().__call__(batch, batch_idx)

    def _move(self, loss: Any) -> None:
        if isinstance(loss, Tensor):
            with self.factors.collected(loss):
                loss.backward()  # type: ignore[no-untyped-call]
            self._update(float(self.optimizer.param_groups[0]["lr"]))

    @torch.no_grad()
    def _update(self, lr: float) -> None:
        found = {layer.weight: pairs for layer, pairs in self.factors.found.items()}
        params = [p for p in self.params if p.requires_grad]
        sloping = [p for p in params if p.grad is not None]
        if not sloping and not found:
            return  # a batch without a loss makes no step
        check_dense(sloping)  # before any update, so that a refused step leaves the model unchanged
        strength = lr * self.augmented.rho
        for weight, pairs in found.items():
            slopes, inputs = (torch.cat(part) for part in zip(*pairs, strict=True))
            target = self.pulls.get(weight)  # None for a personal weight, to which the problem adds no term
            numbers = (1 - strength, strength) if self.augmented.rho and target is not None else (1.0, -lr)
            _move(weight, target, inputs, slopes, *numbers, lr)
        rest = [p for p in params if p in self.pulls and p not in found]
        pulls = [self.pulls[p] for p in rest]
        if self.augmented.rho and rest:
            torch._foreach_lerp_(rest, pulls, strength)
        elif rest:
            torch._foreach_add_(rest, pulls, alpha=-lr)
        if sloping:
            torch._foreach_add_(sloping, [p.grad for p in sloping], alpha=-lr)
        self.factors.found.clear()
        vars(self.optimizer)["_opt_called"] = True  # schedulers warn if no optimiser step came before
        self.augmented.count(lr)


def _move(
    weight: Tensor, target: Tensor | None, inputs: Tensor, slopes: Tensor, keep: float, pull: float, lr: float
) -> None:
    """``weight <- keep * weight + pull * target - lr * slopes.T @ inputs``, in place."""
    if linear.is_for_c(weight, inputs):
        linear.move(weight, target, inputs, slopes, keep, pull, lr)
        return
    if target is not None:
        weight.mul_(keep).add_(target, alpha=pull)
    weight.addmm_(slopes.t(), inputs, alpha=-lr)
