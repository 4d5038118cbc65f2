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

#: Maximum number of clients in one stack: larger stacks are not faster and take memory.
STACK = 128
#: Number of parameters above which a single step keeps a CPU busy, so that stacking only costs memory.
LARGE = 2**18
#: Maximum number of entries in the stacked parameters; larger models get smaller stacks.
STACK_NUMBERS = 2**20


def unfavourable(module: nn.Module) -> str | None:
    """Why stacking the clients of a module is not faster on a CPU; None if it should be."""
    parameters = sum(p.numel() for p in module.parameters() if p.requires_grad)
    if parameters > LARGE:
        return f"{parameters:,} parameters keep the machine busy one client at a time"
    if any(isinstance(part, nn.modules.conv._ConvNd) for part in module.modules()):
        return "convolutions with weights of their own for each client are slow on a CPU"
    return None


def rounded(m: int) -> int:
    """Round the size of a stack up by at most an eighth: each size needs its own graph, so few sizes are used.

    >>> [rounded(m) for m in (1, 10, 17, 250)]
    [1, 10, 18, 256]
    """
    step: int = max(1, 1 << m.bit_length() >> 4)
    return -(-m // step) * step


class Direction:
    """Turn the losses' gradients of a stack (m, d) into those of its problems, clipped per client as the trainer says.

    Args:
        rho: weight of the penalty.
    """

    def __init__(self, trainer: pl.Trainer, rho: float) -> None:
        self.rho, self.limit = rho, trainer.gradient_clip_val
        self.by_value = trainer.gradient_clip_algorithm == "value"

    @property
    def key(self) -> tuple[Hashable, ...]:
        """The settings that are compiled into C code; the penalty's weight is an argument of the code."""
        return bool(self.rho), self.limit, self.by_value

    def __call__(self, gradient: Tensor, x: Tensor, constant: Tensor | None, rho: Tensor | None = None) -> Tensor:
        """Compute the directions; C code passes the penalty's weight as a tensor, so that one code fits all values."""
        if self.rho:
            gradient = torch.add(gradient, x, alpha=self.rho) if rho is None else gradient + rho * x
        if constant is not None:  # in place only if the tensor was made above: the caller owns the first gradient
            gradient = gradient.add_(constant) if self.rho else gradient + constant
        if not self.limit:
            return gradient
        if self.by_value:
            return gradient.clamp(-self.limit, self.limit)
        norm: Tensor = gradient.norm(dim=1, keepdim=True)
        return gradient * (self.limit / (norm + 1e-6)).clamp(max=1.0)


def stacked_optimizer(optimizer: Optimizer, stacked: dict[int, Tensor]) -> Optimizer:
    """Copy an optimiser without its state, for stacked parameters, which are given by the ids of the original ones.

    Fused kernels are switched off: they need contiguous parameters, and stacked parameters are views of ``x``.
    """
    twin = copy.copy(optimizer)
    twin.state = defaultdict(dict)
    plain = {"fused": False} if any("fused" in group for group in optimizer.param_groups) else {}
    twin.param_groups = [
        {**group, **plain, "params": [stacked[id(p)] for p in group["params"] if id(p) in stacked]}
        for group in optimizer.param_groups
    ]
    return twin
