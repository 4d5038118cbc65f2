"""Any LightningModule and its data as an answer to the question."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core import Solution
from lightning_fed.vector import Layout, overwrite, parameters_of

if TYPE_CHECKING:
    import pytorch_lightning as pl

    from lightning_fed.visit import ClientLoop, Visit


class AugmentedGradient:
    r"""Adds the gradient of :math:`\langle\ell, x\rangle + \frac\rho2\|x - c\|^2` to ``.grad`` before a step.

    Added to the gradient and not to the loss: any optimiser, clipping, accumulation and precision then works on the
    gradient of the whole question, and the loss that is logged stays the plain :math:`f_i`.
    """

    def __init__(
        self, module: pl.LightningModule, layout: Layout, linear: Tensor | None, rho: float, center: Tensor
    ) -> None:
        self.rho = rho
        constant = _constant(linear, rho, center)
        named = dict(module.named_parameters())
        parts = {} if constant is None else layout.split(constant)
        self._constants = {id(named[name]): part.to(named[name].dtype) for name, part in parts.items()}

    @torch.no_grad()
    def add_to(self, optimizer: Optimizer) -> None:
        if not self._constants:
            return
        params = [p for group in optimizer.param_groups for p in group["params"] if id(p) in self._constants]
        params = [p for p in params if p.requires_grad]
        if all(p.grad is None for p in params):
            return  # a batch without a loss makes no step
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
            elif p.grad.layout is not torch.strided:
                raise TypeError(
                    "Sparse gradients cannot carry the augmented Lagrangian: every entry gets a gradient."
                    " Build the embedding with sparse=False."
                )
        grads = [p.grad for p in params]
        if self.rho:
            torch._foreach_add_(grads, params, alpha=self.rho)
        torch._foreach_add_(grads, [self._constants[id(p)] for p in params])


def _constant(linear: Tensor | None, rho: float, center: Tensor) -> Tensor | None:
    if not rho:
        return linear
    return -rho * center if linear is None else linear - rho * center


class ModuleLocal:
    """One client's visit: loads the start into the module, runs local work, reads the answer."""

    def __init__(self, loop: ClientLoop, layout: Layout, visit: Visit) -> None:
        self.loop, self.layout, self.visit = loop, layout, visit

    def solve(
        self, start: Tensor, *, linear: Tensor | None = None, rho: float = 0.0, center: Tensor | None = None
    ) -> Solution:
        module = self.loop.trainer.lightning_module
        overwrite(parameters_of(module), self.layout.split(start))
        center = torch.zeros_like(start) if center is None else center
        question = AugmentedGradient(module, self.layout, linear, rho, center)
        loss, steps = self.loop.run(self.visit, question)
        return Solution(self.layout.flatten(parameters_of(module)), loss, steps)
