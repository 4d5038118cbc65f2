"""One client's visit: run its local batches through the trainer's module."""

from __future__ import annotations

import math
import time
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any

import torch

from lightning_fed.core.failures import OvertimeError
from lightning_fed.core.local_work import LocalWork
from lightning_fed.data.loading import counted
from lightning_fed.lightning import (
    Loop,
    SIGTERMException,
    batch_size_of,
    call_module_hook,
    is_param_in_hook_signature,
    pl,
    results_of,
    start_batch,
)
from lightning_fed.local.augmented_gradient import AugmentedGradient
from lightning_fed.local.certificate import Certificate
from lightning_fed.local.schedule import visit_loaders
from lightning_fed.local.steps.hookless import LeanStep
from lightning_fed.local.steps.in_place import FusedStep
from lightning_fed.trainer.batches import move_batch
from lightning_fed.trainer.eligibility import is_in_place_possible, why_not_hookless
from lightning_fed.trainer.hooks import Visit, listening


class ClientLoop(Loop):
    """Local work of one client: batches through Lightning's automatic or manual optimisation, or the lean step."""

    def __init__(self, trainer: pl.Trainer, work: LocalWork) -> None:
        super().__init__(trainer)
        self.work = work
        self.question: AugmentedGradient | None = None
        self.stepping = True
        self._lean: LeanStep | None = None
        self._began: int | None = None  # number of optimiser steps when the visit began

    @property
    def visiting(self) -> bool:
        return self.question is not None

    @property
    def steps_taken(self) -> int:
        """Number of optimiser steps in this visit; 0 outside a visit."""
        return 0 if self._began is None else self.trainer.fit_loop.epoch_loop.optimizer_steps - self._began

    def run(self, visit: Visit, question: AugmentedGradient) -> tuple[float, int]:
        """Train one client; return the mean loss (nan if the module reports none) and the number of batches."""
        module, rounds = self.trainer.lightning_module, self.trainer.fit_loop.epoch_loop
        self.question, self._began = question, rounds.optimizer_steps
        self._wants_index = is_param_in_hook_signature(module.training_step, "batch_idx", min_args=2)
        self._lean = self._step_without_hooks(question)
        visit.step, visit.optimizer_steps, visit.loss = 0, 0, None
        try:
            with rounds.clock.turned(True):
                mean = self._run(visit)
        finally:
            visit.optimizer_steps = self.steps_taken
            self.question = self._began = rounds.clock.batch_idx = None
            rounds.batch_progress.is_last_batch = True  # for Lightning, a round is one batch
        if not math.isfinite(mean) and visit.loss is not None:
            raise FloatingPointError(
                f"the mean loss of {visit.step} local steps is {mean}. Lower the learning rate, clip gradients, or look"
                " at this client's data."
            )
        return mean, visit.step

    def _run(self, visit: Visit) -> float:
        """The mean loss over the samples of a visit."""
        listeners = listening(self.trainer, "on_client_step")
        total, examples, began = None, 0, time.monotonic() - visit.lateness
        for batch_idx, last, batch, samples in self._batches(visit):
            loss, size, go_on = self._advance(batch, samples, batch_idx, last)
            visit.step += go_on
            if loss is not None:
                visit.loss = loss
                total = loss * size if total is None else total + loss * size
                examples += size
            if listeners:
                self._tell(listeners, visit)
            if self.trainer.received_sigterm:
                raise SIGTERMException
            self._check_time(visit, began)
            if not go_on:
                break
        return float("nan") if total is None else float(total / examples)

    def _check_time(self, visit: Visit, began: float) -> None:
        limit = self.work.seconds
        if limit is not None and (taken := time.monotonic() - began) > limit:
            raise OvertimeError(
                f"{visit.step} of {visit.planned} batches took {taken:.3g} s, the limit is {limit:g} s. Raise"
                " FailurePolicy.max_seconds, or give visits less work."
            )

    def _tell(self, listeners: list[Any], visit: Visit) -> None:
        """Call ``on_client_step`` with the clock stopped, because callbacks count rounds."""
        progress, clock = self.trainer.fit_loop.epoch_loop.batch_progress, self.trainer.fit_loop.clock
        last, progress.is_last_batch = progress.is_last_batch, True
        with clock.turned(False):
            for callback in listeners:
                callback.on_client_step(self.trainer, self.trainer.lightning_module, visit)
        progress.is_last_batch = last

    def _step_without_hooks(self, question: AugmentedGradient) -> LeanStep | None:
        if why_not_hookless(self.trainer) is not None:
            return None
        if question.plain and is_in_place_possible(self.trainer):
            return FusedStep(self.trainer, question, self._wants_index)
        return LeanStep(self.trainer, question, self._wants_index)

    def _batches(self, visit: Visit) -> Iterator[tuple[int, bool, Any, int | None]]:
        """Yield the batches of the visit: index, whether it is the last planned one, batch, samples if known."""
        done = 0
        for loader, count in visit_loaders(self.trainer, self.work, visit):
            for batch_idx, (batch, samples) in zip(range(done, done + count), counted(loader), strict=False):
                yield batch_idx, batch_idx == visit.planned - 1, batch, samples
            done += count
            if isinstance(visit.certificate, Certificate) and visit.certificate.renew():
                return

    def _advance(
        self, batch: Any, samples: int | None, batch_idx: int, last: bool
    ) -> tuple[torch.Tensor | None, int, bool]:
        trainer, rounds = self.trainer, self.trainer.fit_loop.epoch_loop
        results = results_of(trainer)
        rounds.clock.batch_idx, rounds.batch_progress.is_last_batch = batch_idx, last
        batch = move_batch(trainer, batch) if self._lean is None else trainer.precision_plugin.convert_input(batch)
        start_batch(trainer, batch)
        results.batch_size = samples  # weight of logged values; if it is None, Lightning infers it from the batch
        self.stepping = last or (batch_idx + 1) % trainer.accumulate_grad_batches == 0
        if self._lean is None and call_module_hook(trainer, "on_train_batch_start", batch, batch_idx) == -1:
            return None, 0, False
        output = self._hooked(batch, batch_idx) if self._lean is None else self._without_hooks(batch, batch_idx)
        if self.stepping:
            self.step_schedulers(batch_idx)
        if self._lean is None:
            call_module_hook(trainer, "on_train_batch_end", output, batch, batch_idx)
        results.batch = results.batch_size = None
        loss = output.get("loss")
        if loss is None:
            return None, 0, True
        return loss.detach(), batch_size_of(batch) if samples is None else samples, True

    def _without_hooks(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        assert self._lean is not None
        output = self._lean(batch, batch_idx)
        self.trainer.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step.increment_completed()
        return output

    def _hooked(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        assert self.question is not None
        assert self._began is not None
        before = self.steps_taken
        self.question.before_batch(batch, batch_idx)
        output = self._optimize(batch, batch_idx)
        if self.stepping and self.trainer.optimizers:
            steps = self.steps_taken - before
            self._began += steps  # after_step may run the batch again, which has to see the same global_step
            self.question.after_step(self.trainer.optimizers[0])
            self._began -= steps
        return output

    def _optimize(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        trainer = self.trainer
        rounds = trainer.fit_loop.epoch_loop
        kwargs = OrderedDict(batch=batch, batch_idx=batch_idx) if self._wants_index else OrderedDict(batch=batch)
        if not trainer.lightning_module.automatic_optimization:
            return dict(rounds.manual_optimization.run(kwargs))
        output = dict(rounds.automatic_optimization.run(trainer.optimizers[0], batch_idx, kwargs))
        if "loss" in output:
            output["loss"] = output["loss"] * trainer.accumulate_grad_batches
        return output

    def step_schedulers(self, batch_idx: int) -> None:
        """Step schedulers with interval "step"; called after every local step."""
        trainer = self.trainer
        if not trainer.lightning_module.automatic_optimization:
            return
        for config in trainer.lr_scheduler_configs:
            if config.interval == "step" and (batch_idx + 1) % config.frequency == 0:
                monitor = trainer.callback_metrics.get(str(config.monitor)) if config.reduce_on_plateau else None
                if monitor is not None or not config.reduce_on_plateau:
                    call_module_hook(trainer, "lr_scheduler_step", config.scheduler, monitor)

    def scheduled(self, done: int) -> Iterator[None]:
        """Step schedulers as the remaining batches of T would, after ``done`` batches of a visit; does not train.

        Yields before each step, when optimisers have the settings of that step.
        """
        trainer, rounds = self.trainer, self.trainer.fit_loop.epoch_loop
        every, clock = trainer.accumulate_grad_batches, rounds.clock
        for optimizer in trainer.optimizers:
            vars(optimizer)["_opt_called"] = True  # schedulers warn if no optimiser step came before
        try:
            with clock.turned(True):
                for step in range(-(-done // every), clock.steps):  # rounded up: the last batch of a visit steps
                    yield
                    clock.batch_idx = min((step + 1) * every, clock.batches) - 1
                    self._began = rounds.optimizer_steps - (step + 1)
                    self.step_schedulers(clock.batch_idx)
        finally:
            self._began = clock.batch_idx = None
