"""Plain gradient steps of large models with as little memory traffic as possible.

A step of SGD on the question is ``x <- lerp(x, centre - linear / rho, lr * rho) - lr * gradient``, done in place. The
gradient of a large linear layer's weight is a product of two small matrices; it is never formed, but multiplied into
the weight. On a CPU that halves the time of a step of the FEMNIST network, which is bound by memory bandwidth.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed.lean import LeanStep
from lightning_fed.local.module import AugmentedGradient, check_dense
from lightning_fed.local.stack import is_plain

#: Models with fewer parameters gain nothing.
LARGE_MODEL = 2**18
#: Weights with fewer entries gain nothing.
LARGE_WEIGHT = 2**18

#: What a weight's gradient is the product of: the gradients of its outputs, and its inputs.
Factors = list[tuple[nn.Linear, Tensor, Tensor]]


class _Linear(torch.autograd.Function):
    """A linear map that hands over the two factors of its weight's gradient in place of the gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, layer: nn.Linear, factors: Factors) -> Tensor:
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.factors, ctx.has_bias = layer, factors, bias is not None
        return nn.functional.linear(x, weight, bias)

    @staticmethod
    def backward(ctx: Any, slope: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = slope.reshape(-1, slope.shape[-1])
        ctx.factors.append((ctx.layer, rows, x.reshape(-1, x.shape[-1])))
        towards_x = slope @ weight if ctx.needs_input_grad[0] else None
        return towards_x, None, rows.sum(0) if ctx.has_bias else None, None, None


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
        and not part.weight._backward_hooks
        and not part.weight._post_accumulate_grad_hooks
        and "forward" not in vars(part)
    ]


@contextmanager
def factored(layers: Sequence[nn.Linear]) -> Iterator[Factors]:
    """While it lasts, these layers give factors of their weights' gradients, and no gradients of their weights."""
    factors: Factors = []
    for layer in layers:
        vars(layer)["forward"] = partial(_forward, layer, factors)
    try:
        yield factors
    finally:
        for layer in layers:
            del vars(layer)["forward"]


def _forward(layer: nn.Linear, factors: Factors, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return nn.functional.linear(x, layer.weight, layer.bias)
    out: Tensor = _Linear.apply(x, layer.weight, layer.bias, layer, factors)
    return out


def is_possible(trainer: pl.Trainer) -> bool:
    """Whether local steps are plain gradient steps of a large model."""
    size = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
    optimizer = trainer.optimizers[0]
    listened = optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks
    plain = is_plain(optimizer) and not trainer.gradient_clip_val and not listened
    return plain and size >= LARGE_MODEL and type(trainer.precision_plugin).__name__ in ("Precision", "DoublePrecision")


class FusedStep(LeanStep):
    """One local step: ``training_step``, backward, and one update in place.

    Args:
        layers: whose weights' gradients are not formed.
    """

    def __init__(
        self, trainer: pl.Trainer, question: AugmentedGradient, wants_index: bool, layers: Sequence[nn.Linear]
    ) -> None:
        super().__init__(trainer, question, wants_index)
        self.layers = layers
        self.params = [p for group in self.optimizer.param_groups for p in group["params"] if p.requires_grad]
        self.targets, self.linear = question.pulls(self.params)

    def __call__(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        self.module._current_fx_name = "training_step"
        with factored(self.layers) as factors, self.trainer.precision_plugin.train_step_context():
            output: Any = self.module.training_step(*((batch, batch_idx) if self.wants_index else (batch,)))
            loss = output["loss"] if isinstance(output, Mapping) else output
            self.optimizer.zero_grad()
            factors.clear()  # those of gradients that the step itself asked for
            if isinstance(loss, Tensor):
                loss.backward()  # type: ignore[no-untyped-call]
        self._update(factors)
        return {} if loss is None else {"loss": loss.detach()}

    @torch.no_grad()
    def _update(self, factors: Factors) -> None:
        moved = [p for p in self.params if p.grad is not None]
        if not moved and not factors:
            return  # a batch without a loss makes no step
        lr = float(self.optimizer.param_groups[0]["lr"])
        if self.targets or self.linear:
            check_dense(moved)
        if self.targets:
            torch._foreach_lerp_(self.params, self.targets, lr * self.question.rho)
        elif self.linear:
            torch._foreach_add_(self.params, self.linear, alpha=-lr)
        if moved:
            torch._foreach_add_(moved, [p.grad for p in moved], alpha=-lr)
        for layer, slopes, inputs in factors:
            layer.weight.addmm_(slopes.t(), inputs, alpha=-lr)
        vars(self.optimizer)["_opt_called"] = True  # what schedulers look at before they step
        self.question.lr_sum += lr
