"""Arithmetic on stacked parameters: one tensor (m, *shape) for each parameter, one row for each client."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Hashable

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.lightning import pl

#: Parameters of m clients, in the order of the layout.
Stack = list[Tensor]

#: Clients in one stack: more gain nothing and take memory.
STACK = 128
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


class Direction:
    """From the gradients of a stack (m, d) to those of its problems, clipped for each client as the trainer wants it.

    Args:
        rho: weight of the penalty.
    """

    def __init__(self, trainer: pl.Trainer, rho: float) -> None:
        self.rho, self.limit = rho, trainer.gradient_clip_val
        self.by_value = trainer.gradient_clip_algorithm == "value"

    @property
    def key(self) -> tuple[Hashable, ...]:
        """What C code is made for; the penalty's weight is among what it is given."""
        return bool(self.rho), self.limit, self.by_value

    def __call__(self, gradient: Tensor, x: Tensor, constant: Tensor | None, rho: Tensor | None = None) -> Tensor:
        """The directions; C code is given the penalty's weight as a tensor, to serve every value of it."""
        if self.rho:
            gradient = torch.add(gradient, x, alpha=self.rho) if rho is None else gradient + rho * x
        if constant is not None:  # added in place only to what was made here
            gradient = gradient.add_(constant) if self.rho else gradient + constant
        if not self.limit:
            return gradient
        if self.by_value:
            return gradient.clamp(-self.limit, self.limit)
        norm: Tensor = gradient.norm(dim=1, keepdim=True)
        return gradient * (self.limit / (norm + 1e-6)).clamp(max=1.0)


def stacked_optimizer(optimizer: Optimizer, stacked: dict[int, Tensor]) -> Optimizer:
    """The same optimiser without memory, on stacked parameters instead of its own, which are given by their ids.

    Its fused kernels take every parameter for one piece of memory, which a stacked one is not.
    """
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    plain = {"fused": False} if any("fused" in group for group in optimizer.param_groups) else {}
    twin.param_groups = [
        {**group, **plain, "params": [stacked[id(p)] for p in group["params"] if id(p) in stacked]}
        for group in optimizer.param_groups
    ]
    return twin
