"""Arithmetic on stacked parameters: one tensor (m, *shape) for each parameter, one row for each client."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.optim import SGD, Optimizer

#: Parameters of m clients, in the order of the layout.
Stack = list[Tensor]

#: Clients in one stack: more gain nothing and take memory.
STACK = 256
#: Above this many parameters a single step keeps a CPU busy; stacking only costs memory.
LARGE = 2**18
#: Numbers in one parameter stack, for larger models.
STACK_NUMBERS = 2**20


def unfavourable(module: nn.Module) -> str | None:
    """Why many small computations would not be faster as one on a CPU; None if they should be."""
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if parameters > LARGE:
        return f"{parameters:,} parameters keep the machine busy one client at a time"
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules()):
        return "convolutions with weights of their own for each client are slow on a CPU"
    return None


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
        return [g * per_client(factor, g) for g in gradients]

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


def per_client(values: Tensor, p: Tensor) -> Tensor:
    """One value for each client (or for all), in the shape that multiplies a stacked parameter."""
    return values if values.ndim == 0 else values.view(-1, *(1 for _ in p.shape[1:]))
