"""Local steps without Lightning's hooks, where nobody listens to them.

The same numbers as Lightning's own optimisation loop (a test compares them bitwise) in about half the time on small
models; :func:`why_not` says what stands in the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from lightning_fed.lightning import PassThroughProfiler, enter_hook, is_overridden, pl
from lightning_fed.local.augmented_gradient import AugmentedGradient
from lightning_fed.trainer.hooks import is_server

GRADIENT_HOOKS = ("on_before_zero_grad", "on_before_backward", "on_after_backward", "on_before_optimizer_step")
MODULE_HOOKS = (
    *GRADIENT_HOOKS,
    "on_train_batch_start",
    "on_train_batch_end",
    "optimizer_step",
    "optimizer_zero_grad",
    "backward",
    "configure_gradient_clipping",
    "clip_gradients",
    "lr_scheduler_step",
)
TRANSFER_HOOKS = ("on_before_batch_transfer", "transfer_batch_to_device", "on_after_batch_transfer")


def why_not(trainer: pl.Trainer) -> str | None:
    """What stands in the way of steps without hooks in this run; None if nothing does."""
    if trainer.strategy.root_device.type != "cpu":
        return "batches move to another device"
    return needs_hooks(trainer)


def needs_hooks(trainer: pl.Trainer) -> str | None:
    """What needs Lightning's hooks in this run; None if nothing does."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "optimisation is manual"
    if trainer.accumulate_grad_batches != 1:
        return "gradients are accumulated"
    if type(trainer.profiler) is not PassThroughProfiler:
        return "a profiler listens"
    precision = trainer.precision_plugin
    if getattr(precision, "scaler", None) is not None or not type(precision).__module__.startswith("pytorch_lightning"):
        return f"{type(precision).__name__} may change gradients"
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, torch.optim.LBFGS) or not type(optimizer).__module__.startswith("torch.optim"):
            return f"{type(optimizer).__name__} may evaluate a closure"
    for name in (*MODULE_HOOKS, *TRANSFER_HOOKS):
        if is_overridden(name, module):
            return f"{type(module).__name__} overrides {name}"
    for name in TRANSFER_HOOKS:
        if is_overridden(name, trainer.datamodule):
            return f"{type(trainer.datamodule).__name__} overrides {name}"
    for callback in trainer.callbacks:
        for name in GRADIENT_HOOKS:
            if not is_server(callback) and is_overridden(name, callback):
                return f"{type(callback).__name__} overrides {name}"
    return None


class LeanStep:
    """One local step: ``training_step``, backward, the augmented gradient, clipping, ``optimizer.step``."""

    def __init__(self, trainer: pl.Trainer, question: AugmentedGradient, wants_index: bool) -> None:
        self.trainer, self.question, self.wants_index = trainer, question, wants_index
        self.module, self.optimizer = trainer.lightning_module, trainer.optimizers[0]

    def __call__(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        module, precision = self.module, self.trainer.precision_plugin
        enter_hook(module, "training_step")
        self.question.before_batch(batch, batch_idx)
        with precision.train_step_context():
            output: Any = module.training_step(*((batch, batch_idx) if self.wants_index else (batch,)))
        loss = output["loss"] if isinstance(output, Mapping) else output
        self.optimizer.zero_grad()
        if isinstance(loss, Tensor):
            loss.backward()  # type: ignore[no-untyped-call]
        self.question.add_to(self.optimizer)
        if self.trainer.gradient_clip_val:
            algorithm = self.trainer.gradient_clip_algorithm or "norm"
            module.clip_gradients(self.optimizer, self.trainer.gradient_clip_val, algorithm)
        self.optimizer.step()
        self.question.after_step(self.optimizer)
        return {} if loss is None else {"loss": loss.detach()}
