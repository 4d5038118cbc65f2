"""Measure a run before its first round: curvature, planned visits, learning rates; then end the fit."""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from lightning_fed.cli.advising.trial import LearningRateTrial, TrialResult
from lightning_fed.core.algorithm import Weights
from lightning_fed.core.layout import Layout, clones, overwrite, parameters_of
from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator, torch_generator
from lightning_fed.evaluation.curvature import client_curvature
from lightning_fed.evaluation.evaluate import check_differentiable, client_gradient
from lightning_fed.lightning import pl
from lightning_fed.local.schedule import planned_batches
from lightning_fed.local.server_snapshot import Workspace
from lightning_fed.local.step_sizes import StepSizePlan
from lightning_fed.theory.guarantee import CurvatureRange
from lightning_fed.trainer.eligibility import LARGE_MODEL

#: Number of clients of a large model whose curvature is measured.
FEW = 2


@dataclass(frozen=True)
class Measured:
    """What :class:`Surveyor` has measured.

    Args:
        parameters: number of the model's trained parameters.
        curvature: of the measured clients' losses.
        local_steps: median of the planned local steps of a visit.
        tau: planned sum of the step sizes of a visit, by weights; NaN if steps are not plain gradient steps.
        lr: largest learning rate of the optimisers before round 0.
        trial: of learning rates, if there was one.
    """

    parameters: int
    curvature: CurvatureRange
    local_steps: int
    tau: dict[Weights, float]
    lr: float
    trial: TrialResult | None

    @property
    def plain(self) -> bool:
        """Whether local steps are plain gradient steps, whose lengths are known."""
        return all(tau > 0 for tau in self.tau.values())

    @property
    def advised_lr(self) -> float:
        """The learning rate of the trial; the run's own if there was none, or if it was not conclusive."""
        return self.trial.best.lr if self.trial is not None and self.trial.conclusive else self.lr


class Surveyor(pl.Callback):
    """Measures before the first round, and then ends the fit.

    Args:
        clients: number of clients to measure, drawn by the seed.
        steps: number of gradient steps to the second point where curvature is measured.
        rounds: visits of every client in the trial of learning rates; 0 for no trial.
        tell: is given lines about the progress.
    """

    def __init__(self, clients: int, steps: int, rounds: int, tell: Callable[[str], None]) -> None:
        self.clients, self.steps, self.rounds, self.tell = clients, steps, rounds, tell
        self.measured: Measured | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        check_differentiable(pl_module, "choose another model: there is nothing to measure")
        loop: Any = trainer.fit_loop
        ids = trainer.datamodule.client_ids
        drawn = numpy_generator(loop.server.seed, "advise").choice(len(ids), min(self.clients, len(ids)), replace=False)
        chosen = [ids[i] for i in sorted(drawn)]
        curvature = self._curvature(trainer, chosen)
        trial = LearningRateTrial(trainer, chosen, self.rounds, self.tell)
        self.measured = Measured(
            parameters=trial.layout.numel,
            curvature=curvature,
            local_steps=round(statistics.median(planned_batches(trainer, loop.server.local_work).values())),
            tau=_planned_sums(trainer),
            lr=trial.lr,
            trial=self._tried(trial),
        )
        trainer.should_stop = True

    def _tried(self, trial: LearningRateTrial) -> TrialResult | None:
        if not self.rounds or not trial.lr:
            return None
        self.tell(f"Trying learning rates: {self.rounds} visits to each of {len(trial.clients)} clients ...")
        return trial.run()

    def _curvature(self, trainer: pl.Trainer, chosen: list[ClientId]) -> CurvatureRange:
        module = trainer.lightning_module
        loop: Any = trainer.fit_loop
        layout, parameters = Layout.of(module, loop.server.personal), parameters_of(module)
        chosen = chosen if layout.numel < LARGE_MODEL else chosen[:FEW]  # of a large model it takes minutes
        self.tell(f"Measuring the curvature of {len(chosen)} clients' losses ...")
        first = clones(parameters)
        try:
            here = _curvatures(trainer, layout, chosen)
            L = max(curvature.L for curvature in here)
            if not 0 < L < math.inf:
                raise ValueError(
                    f"The curvature of {type(module).__name__}'s loss is {L:g} at its first model, so no advice"
                    " can be given. Check whether the loss is linear, or not finite."
                )
            for _ in range(self.steps):
                slope = torch.stack([client_gradient(trainer, layout, cid) for cid in chosen]).mean(0)
                overwrite(parameters, layout.split(layout.flatten(parameters) - slope / L))
            there = _curvatures(trainer, layout, chosen) if self.steps else here
        finally:
            overwrite(parameters, first)
        return CurvatureRange(
            at_start=L,
            later=max(curvature.L for curvature in there),
            steps=self.steps,
            lowest=min(curvature.lowest for curvature in here + there),  # NaN if unknown
            method="differences" if any(c.method == "differences" for c in here + there) else "hessian",
            clients=len(chosen),
        )


def _curvatures(trainer: pl.Trainer, layout: Layout, chosen: list[ClientId]) -> list[Any]:
    """The curvature of each client's loss; roughly, and without the lowest, for a large model."""
    loop: Any = trainer.fit_loop
    large = layout.numel >= LARGE_MODEL
    how: dict[str, Any] = {"iterations": 10 if large else 20, "tolerance": 1e-2 if large else 1e-3, "lowest": not large}
    return [
        client_curvature(trainer, layout, cid, torch_generator(loop.server.seed, "advise", cid), **how)
        for cid in chosen
    ]


def _planned_sums(trainer: pl.Trainer) -> dict[Weights, float]:
    """The planned sum of the step sizes of a visit, by the two weights of clients."""
    loop, data = trainer.fit_loop, trainer.datamodule
    batches = planned_batches(trainer, loop.server.local_work)
    by: dict[Weights, dict[ClientId, float]] = {
        "uniform": dict.fromkeys(batches, 1.0),
        "samples": {cid: float(data.num_examples(cid)) for cid in batches},
    }
    client_loop: Any = loop.epoch_loop.client_loop
    return {name: StepSizePlan(batches, own).lr_sum(client_loop, Workspace(trainer)) for name, own in by.items()}
