"""Decide which faster ways to train a run allows, and what "plain SGD" means; no other module decides this.

Functions that begin with ``why_not`` return a reason against a way to train in words, or None if there is none.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import torch
from torch import nn, optim
from torch.optim import SGD, Optimizer
from torchmetrics import Metric

from lightning_fed.core.layout import buffers_of
from lightning_fed.core.local_work import LocalWork
from lightning_fed.lightning import DoublePrecision, PassThroughProfiler, Precision, is_overridden, pl
from lightning_fed.lightning.mixtures import package_of
from lightning_fed.lightning.package import PACKAGE
from lightning_fed.trainer.hooks import is_server, reading

#: Minimum number of parameters for steps in place; smaller models do not gain.
LARGE_MODEL = 2**18

#: Optimisers that update every entry independently, so that a stack of models is just a larger model.
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


def why_not_hookless(trainer: pl.Trainer) -> str | None:
    """Why steps cannot skip Lightning's hooks in this run; None if they can."""
    if trainer.strategy.root_device.type != "cpu":
        return "batches move to another device"
    return needs_hooks(trainer)


def needs_hooks(trainer: pl.Trainer) -> str | None:
    """Why this run needs Lightning's hooks; None if it does not."""
    module = trainer.lightning_module
    if not module.automatic_optimization:
        return "optimisation is manual"
    if trainer.accumulate_grad_batches != 1:
        return "gradients are accumulated"
    if type(trainer.profiler) is not PassThroughProfiler:
        return "a profiler listens"
    precision = trainer.precision_plugin
    if getattr(precision, "scaler", None) is not None or package_of(type(precision)) != PACKAGE:
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


# -- plain SGD -----------------------------------------------------------------------------------------------------


def why_not_plain(optimizer: Optimizer, decay: bool = False, rates: bool = False, momentum: bool = False) -> str | None:
    """Why the steps of an optimiser are not ``x - lr * gradient`` with one lr; None if they are.

    Args:
        decay, rates: whether weight decay, and groups with different learning rates, count as plain.
        momentum: whether momentum does, if all groups have the same and it is neither dampened nor Nesterov's.
    """
    groups = optimizer.param_groups
    if type(optimizer) is not SGD:
        return type(optimizer).__name__
    if not momentum and any(group["momentum"] or group["nesterov"] for group in groups):
        return "SGD with momentum"
    if any(group["nesterov"] or group["dampening"] for group in groups if group["momentum"]):
        return "SGD with Nesterov's or dampened momentum"
    if len({float(group["momentum"]) for group in groups}) > 1:
        return "different momenta"
    if any(group["maximize"] for group in groups):
        return "SGD that maximises"
    if not rates and len({float(group["lr"]) for group in groups}) > 1:
        return "different learning rates"
    if not decay and any(group["weight_decay"] for group in groups):
        return "SGD with weight decay"
    return None


def is_plain(optimizer: Optimizer) -> bool:
    """Whether the steps of an optimiser are ``x - lr * gradient`` with one lr."""
    return why_not_plain(optimizer) is None


def plain_lr(optimizers: Sequence[Optimizer]) -> float | None:
    """The largest step size if local steps are plain gradient steps; otherwise None."""
    plain = all(why_not_plain(optimizer, decay=True, rates=True) is None for optimizer in optimizers)
    rates = [float(group["lr"]) for optimizer in optimizers for group in optimizer.param_groups]
    return max(rates) if plain and rates else None


def is_listened_to(optimizer: Optimizer) -> bool:
    """Whether a hook listens to an optimiser's steps."""
    return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)


# -- engines -------------------------------------------------------------------------------------------------------


def is_in_place_possible(trainer: pl.Trainer) -> bool:
    """Whether local steps are plain gradient steps of a large model, so that they can be taken in place."""
    size = sum(p.numel() for p in trainer.lightning_module.parameters() if p.requires_grad)
    optimizer = trainer.optimizers[0]
    parting = len(optimizer.param_groups) > 1 and any(c.interval == "step" for c in trainer.lr_scheduler_configs)
    plain = is_plain(optimizer) and not trainer.gradient_clip_val and not is_listened_to(optimizer) and not parting
    return plain and size >= LARGE_MODEL and type(trainer.precision_plugin) in (Precision, DoublePrecision)


def why_not_stacked(
    trainer: pl.Trainer, work: LocalWork, keeps_buffers: bool, dtype: torch.dtype, personal: Sequence[str] = ()
) -> str | None:
    """Why clients cannot be stacked, as far as settings tell; the probe checks the rest."""
    if personal:  # a stack begins with one model for all clients
        return f"clients keep personal parts ({', '.join(personal[:3])}{', ...' if len(personal) > 3 else ''})"
    module = trainer.lightning_module
    if reason := needs_hooks(trainer):
        return reason
    if type(trainer.precision_plugin) not in (Precision, DoublePrecision):
        return f"precision {trainer.precision} is mixed"
    if len(trainer.optimizers) != 1 or type(trainer.optimizers[0]) not in ELEMENTWISE:
        return f"{', '.join(type(o).__name__ for o in trainer.optimizers)} may mix the clients of a stack"
    if is_listened_to(trainer.optimizers[0]):
        return "a hook listens to the optimiser"
    if name := hooked(module):
        return f"a hook listens to {name}"
    trained = {p for group in trainer.optimizers[0].param_groups for p in group["params"] if p.requires_grad}
    if trained != {p for p in module.parameters() if p.requires_grad}:
        return "the optimiser does not train all parameters"
    if any(p.dtype != dtype for p in trained):
        return "parameters have different precisions"
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        return "a scheduler steps with every batch"
    if work.tolerance is not None:
        return "visits end when their problem is solved well enough"
    if work.seconds is not None:
        return "visits have a time limit, which is looked at between batches"
    if keeps_buffers and buffers_of(module):
        return "clients keep buffers of their own"
    for hook in ("on_client_start", "on_client_step"):
        for callback in reading(trainer, hook):
            return f"{type(callback).__name__} has an {hook} hook"
    return None


def hooked(module: nn.Module) -> str | None:
    """Name of a parameter or submodule with a hook, which may change or keep tensors; None if there is none."""
    for name, p in module.named_parameters():
        if p._backward_hooks or p._post_accumulate_grad_hooks:
            return name
    for name, part in module.named_modules():
        if part._forward_hooks or part._forward_pre_hooks or part._backward_hooks or part._backward_pre_hooks:
            return name or type(part).__name__
    return None


def why_not_workers(trainer: pl.Trainer) -> str | None:
    """Why clients cannot run in worker processes; None if they can."""
    if not hasattr(os, "fork") or not hasattr(os, "memfd_create"):
        return "this system cannot fork with shared memory"
    if trainer.strategy.root_device.type != "cpu":
        return "an accelerator cannot be shared by forked processes"
    return why_not_merged(trainer)


def why_not_merged(trainer: pl.Trainer) -> str | None:
    """Why what happens in visits in other processes cannot be merged into this one; None if it can."""
    callbacks: list[pl.Callback] = trainer.callbacks
    for callback in callbacks:
        for name in GRADIENT_HOOKS:
            if not is_server(callback) and is_overridden(name, callback):
                return f"{type(callback).__name__} overrides {name}"
    for hook in ("on_client_start", "on_client_step"):
        for callback in reading(trainer, hook):
            return f"{type(callback).__name__} has an {hook} hook"
    for part in trainer.lightning_module.modules():
        if isinstance(part, Metric) and (part.full_state_update is not False or part.dist_sync_on_step):
            return f"{type(part).__name__} cannot be merged from parts"
    return None
