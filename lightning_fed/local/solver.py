"""Any LightningModule and its data as an answer to the question."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Question, Solution, StepMap
from lightning_fed.core.layout import Layout, overwrite, parameters_of
from lightning_fed.core.randomness import torch_generator
from lightning_fed.local.augmented_gradient import AugmentedGradient
from lightning_fed.local.certificate import Certificate
from lightning_fed.local.client_loop import ClientLoop
from lightning_fed.trainer.hooks import Visit


class ModuleLocal:
    """One client's visit: loads the start into the module, runs local work, reads the answer.

    Args:
        slope: gives the gradient of the client's loss at the module's parameters, over all its data.
        slope_again: the same over a batch that was just trained on, its index, and its state of random numbers.
    """

    def __init__(
        self,
        loop: ClientLoop,
        layout: Layout,
        visit: Visit,
        slope: Callable[[], Tensor],
        slope_again: Callable[..., Tensor],
    ) -> None:
        self.loop, self.layout, self.visit, self.slope, self.slope_again = loop, layout, visit, slope, slope_again

    def solve(
        self,
        start: Tensor,
        *,
        linear: Tensor | None = None,
        rho: float = 0.0,
        center: Tensor | None = None,
        after_step: StepMap | None = None,
        evaluate_at: StepMap | None = None,
        work: float = 1.0,
        estimate: Tensor | None = None,
    ) -> Solution:
        if estimate is not None and self.loop.trainer.accumulate_grad_batches != 1:
            raise ValueError("An estimate of the gradient changes with every batch. Use accumulate_grad_batches=1.")
        visit, tolerance = self.visit, self.loop.work.tolerance
        visit.work = work
        module = self.loop.trainer.lightning_module
        overwrite(parameters_of(module), self.layout.split(start))
        center = torch.zeros_like(start) if rho and center is None else center
        if after_step is None and evaluate_at is None:
            visit.question = Question(linear, rho, center)
            if tolerance is not None:
                visit.certificate = Certificate(visit.question, tolerance, visit.round, self._point, self.slope)
                if visit.certificate.holds:
                    return Solution(start, lr_sum=0.0, residual=visit.certificate.residual)
        extras = (after_step, evaluate_at, estimate, self.slope_again)
        question = AugmentedGradient(module, self.layout, linear, rho, center, *extras)
        loss, steps = self.loop.run(visit, question)
        solution = Solution(self._point(), loss, steps, question.lr_sum, question.estimate)
        if (reached := visit.certificate) is None:
            return solution
        return replace(solution, residual=reached.residual, reached=reached.holds)

    def _point(self) -> Tensor:
        return self.layout.flatten(parameters_of(self.loop.trainer.lightning_module))

    def gradient(self, x: Tensor) -> Tensor:
        overwrite(parameters_of(self.loop.trainer.lightning_module), self.layout.split(x))
        return self.slope()

    def rng(self, purpose: str) -> torch.Generator:
        return torch_generator(self.loop.work.seed, self.visit.round, self.visit.client, purpose)
