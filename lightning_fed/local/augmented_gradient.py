"""The gradient of a local problem: the gradient of the client's loss, and that of the algorithm's terms."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from lightning_fed.core.layout import Layout, overwrite, parameters_of
from lightning_fed.core.problem import LocalProblem
from lightning_fed.core.reach import Reach
from lightning_fed.lightning import collect_rng_states, pl


class AugmentedGradient:
    r"""Adds the gradient of :math:`\langle\ell, x\rangle + \frac\rho2\|x - c\|^2` to ``.grad`` before a step.

    The terms are added to the gradient, not to the loss: so optimisers, clipping, accumulation and precision work on
    the gradient of the whole problem, and the logged loss stays the plain :math:`f_i`.
    """

    def __init__(
        self,
        module: pl.LightningModule,
        layout: Layout,
        problem: LocalProblem,
        slope_again: Callable[..., Tensor] | None = None,
    ) -> None:
        self.rho, self.estimate = problem.question.rho, problem.estimate
        self.lr_sum, self._reach = 0.0, Reach(problem.question.rho)
        self._slope_again = slope_again
        self._module, self._layout = module, layout
        self._after_step, self._evaluate_at = problem.after_step, problem.evaluate_at
        self._held: Tensor | None = None
        self._stepping = False
        self._question = problem.question

    @property
    def reach(self) -> float:
        """How far the steps go if every gradient is 1; known for SGD."""
        return self._reach.length

    def count(self, lr: float, momentum: float = 0.0) -> None:
        """Count a step of size ``lr``."""
        self.lr_sum += lr
        self._reach.step(lr, momentum)

    @property
    def plain(self) -> bool:
        """Whether steps are unmodified gradient steps on the local problem."""
        return self._after_step is None and self._evaluate_at is None and self.estimate is None

    def pulls(self, params: list[nn.Parameter]) -> dict[Tensor, Tensor]:
        """Minimisers of the added terms by parameter, or, without a penalty, linear terms; empty if there are none."""
        parts = self._by_parameter(self._question.pull)
        return {p: parts[id(p)] for p in params if id(p) in parts}

    @cached_property
    def _constants(self) -> dict[int, Tensor]:
        return self._by_parameter(self._question.constant)

    def _by_parameter(self, x: Tensor | None) -> dict[int, Tensor]:
        named = dict(self._module.named_parameters())
        parts = {} if x is None else self._layout.split(x)
        return {id(named[name]): part.to(named[name].dtype) for name, part in parts.items()}

    def before_batch(self, batch: Any, batch_idx: int) -> None:
        """Load the point at which the gradient is taken into the module, until the step; keep the batch if needed."""
        if self.estimate is not None:
            self._batch = (batch, batch_idx, collect_rng_states())
        if self._evaluate_at is not None and self._held is None:
            self._held = self._read()
            self._write(self._evaluate_at(self._held, self.lr_sum))

    def after_step(self, optimizer: Optimizer) -> None:
        """Count the step, map the new point, and update the estimate; nothing if no step was taken."""
        if not self._stepping:
            return
        group = optimizer.param_groups[0]
        lr = float(group.get("lr", float("nan")))
        self.count(lr, float(group.get("momentum", 0.0)))
        if self._after_step is not None:
            self._write(self._after_step(self._read(), lr))
        if self.estimate is not None and self._slope_again is not None:
            self.estimate = self.estimate + self._slope_again(*self._batch) - self._slope

    def _step_along_the_estimate(self, estimate: Tensor) -> None:
        """Replace the batch's gradient by the estimate; keep the former for the update after the step."""
        params = {name: p for name, p in self._module.named_parameters() if name in self._layout.names}
        found = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in params.items()}
        self._slope = self._layout.flatten(found)
        for name, part in self._layout.split(estimate).items():
            params[name].grad = part.to(params[name].dtype, copy=True)

    def _read(self) -> Tensor:
        return self._layout.flatten(parameters_of(self._module))

    def _write(self, x: Tensor) -> None:
        overwrite(parameters_of(self._module), self._layout.split(x))

    @torch.no_grad()
    def add_to(self, optimizer: Optimizer) -> None:
        if self._held is not None:
            self._write(self._held)
            self._held = None
        params = [p for group in optimizer.param_groups for p in group["params"] if p.requires_grad]
        self._stepping = any(p.grad is not None for p in params)  # a batch without a loss makes no step
        if self._stepping and self.estimate is not None:
            self._step_along_the_estimate(self.estimate)
        if not self._constants or not self._stepping:
            return
        params = [p for p in params if id(p) in self._constants]
        check_dense(params)
        for p in params:
            if p.grad is None:
                p.grad = torch.zeros_like(p)
        grads = [p.grad for p in params]
        if self.rho:
            torch._foreach_add_(grads, params, alpha=self.rho)
        torch._foreach_add_(grads, [self._constants[id(p)] for p in params])


def check_dense(params: list[nn.Parameter]) -> None:
    if any(p.grad is not None and p.grad.layout is not torch.strided for p in params):
        raise TypeError(
            "Sparse gradients cannot carry the augmented Lagrangian: every entry gets a gradient."
            " Build the embedding with sparse=False."
        )
