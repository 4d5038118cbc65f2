"""Solve local problems with any LightningModule and its data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from lightning_fed.core.layout import Layout, overwrite, parameters_of
from lightning_fed.core.problem import Local, LocalProblem, Solution
from lightning_fed.core.randomness import torch_generator
from lightning_fed.local.augmented_gradient import AugmentedGradient
from lightning_fed.local.certificate import Certificate
from lightning_fed.local.client_loop import ClientLoop
from lightning_fed.trainer.hooks import Visit


class ModuleLocal(Local):
    """One client's visit: loads the start into the module, runs local work, reads the solution.

    Args:
        slope: returns the gradient of the client's loss at the module's parameters, over all its data.
        slope_again: returns the same over a batch that was just trained on, from its index and random state.
        spoiled: makes of a solution what a fault that is wanted of the client does.
    """

    def __init__(
        self,
        loop: ClientLoop,
        layout: Layout,
        visit: Visit,
        slope: Callable[[], Tensor],
        slope_again: Callable[..., Tensor],
        spoiled: Callable[[Solution], Solution] = lambda solution: solution,
    ) -> None:
        self.loop, self.layout, self.visit, self.slope, self.slope_again = loop, layout, visit, slope, slope_again
        self.spoiled = spoiled

    def answer(self, problem: LocalProblem) -> Solution:
        return self.spoiled(self._answer(problem))

    def _answer(self, problem: LocalProblem) -> Solution:
        if problem.estimate is not None and self.loop.trainer.accumulate_grad_batches != 1:
            raise ValueError("An estimate of the gradient changes with every batch. Use accumulate_grad_batches=1.")
        visit, start, tolerance = self.visit, problem.start, self.loop.work.tolerance
        visit.work = problem.work
        module = self.loop.trainer.lightning_module
        overwrite(parameters_of(module), self.layout.split(start))
        if problem.question.rho and problem.question.center is None:
            problem = replace(problem, question=replace(problem.question, center=torch.zeros_like(start)))
        if not problem.is_mapped:
            visit.question = problem.question
            if tolerance is not None:
                visit.certificate = Certificate(visit.question, tolerance, visit.round, self._point, self.slope)
                if visit.certificate.holds:
                    return Solution(start, lr_sum=0.0, residual=visit.certificate.residual, reach=0.0)
        question = AugmentedGradient(module, self.layout, problem, self.slope_again)
        loss, steps = self.loop.run(visit, question)
        solution = Solution(self._point(), loss, steps, question.lr_sum, question.estimate, reach=question.reach)
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
