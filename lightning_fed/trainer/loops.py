"""Lightning's fit loop with one round as one epoch of one batch.

``FederatedFitLoop`` > ``RoundLoop`` > ``ClientLoop`` (in ``lightning_fed.local``): the first two inherit everything
that Lightning does about epochs (validation, checkpoints, limits, schedulers, early stopping), the last does the local
work of a client.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from types import MappingProxyType
from typing import Any, Protocol

import torch

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import seed_global
from lightning_fed.data.loading import known_sizes
from lightning_fed.lightning import (
    EpochLoop,
    FitLoop,
    ResultCollection,
    active_results_of,
    call_callback_hooks,
    end_batch,
    is_first_log_in,
    pl,
    restore_callback_metrics,
    results_of,
    set_current_hook,
    start_batch,
)
from lightning_fed.trainer.clock import LocalClock
from lightning_fed.trainer.hooks import RoundReport, telling_of_errors
from lightning_fed.trainer.signals import ended_by_sigterm

#: Progress of a round when a checkpoint is taken; resuming does the remaining stages.
IDLE, TRAINED, VALIDATED, ENDED = "idle", "trained", "validated", "ended"

#: Lightning's loops take a data fetcher as an argument; rounds have none.
NO_FETCHER: Any = None


class RunsRounds(Protocol):
    """The part of the server that the loops use."""

    @property
    def seed(self) -> int: ...

    @property
    def rounds_done(self) -> int: ...

    @property
    def local_time(self) -> int: ...

    def client_loop(self, trainer: pl.Trainer) -> Any: ...

    def most_batches(self, trainer: pl.Trainer) -> int: ...

    def begin_round(self, trainer: pl.Trainer) -> list[ClientId]: ...

    def run_round(self, trainer: pl.Trainer, cohort: list[ClientId]) -> RoundReport: ...

    def check_untouched(self, trainer: pl.Trainer) -> None: ...

    def note_round(self, trainer: pl.Trainer, ended: bool) -> None: ...

    def resume(self, trainer: pl.Trainer, loop_state: dict[str, Any] | None) -> None: ...


class RoundResults(ResultCollection):
    """Logged values of a round: per-step values become sample-weighted means over the round's clients."""

    complete = False
    ended: Mapping[str, Any] = MappingProxyType({})  # values of the round whose values were reset last

    def __setitem__(self, key: str, metric: Any) -> None:
        # Lightning moves a metric's whole state on every log, which costs more than a small model's step
        metric.to = partial(_move_if_elsewhere, metric)
        super().__setitem__(key, metric)

    def log(
        self, fx: str, name: str, value: Any, *, on_step: bool = False, on_epoch: bool = True, **kwargs: Any
    ) -> None:
        super().log(fx, name, value, on_step=on_step and on_epoch, on_epoch=True, **kwargs)

    def metrics(self, on_step: bool) -> Any:
        if on_step and not self.complete:
            return {"callback": {}, "log": {}, "pbar": {}}
        return super().metrics(on_step=False)

    def reset(self, metrics: bool | None = None, fx: str | None = None) -> None:
        """Keep the values in ``ended`` where all are reset: Lightning does so before the fit loop's epoch has ended."""
        if metrics is None and fx is None:
            self.ended = {**self.metrics(on_step=False)["callback"]}
        super().reset(metrics, fx)


def log_numbers(trainer: pl.Trainer, fx: str, numbers: Mapping[str, float]) -> None:
    """Log numbers as a module's ``log_dict`` in the hook ``fx``, without its checks of every number, which are slow."""
    results = results_of(trainer)
    if is_first_log_in(trainer, fx):
        results.reset(metrics=False, fx=fx)
    for name, number in numbers.items():
        results.log(fx, name, torch.tensor(number, dtype=torch.float64), batch_size=1)
    set_current_hook(trainer, fx)


def weigh_by_samples(trainer: pl.Trainer, loader: object, batch_idx: int) -> None:
    """Set the weight of values logged for a batch to its number of samples, if the loader knows this number."""
    sizes = known_sizes(loader)
    if sizes is not None and (results := active_results_of(trainer)) is not None:
        results.batch_size = sizes[batch_idx]


def _move_if_elsewhere(metric: Any, device: Any, **kwargs: Any) -> Any:
    value = vars(metric).get("value")  # a logged torchmetrics object has no value before its first update
    if value is not None and value.device != torch.device(device):
        type(metric).to(metric, device, **kwargs)
    return metric


class RoundLoop(EpochLoop):
    """One round, which Lightning sees as an epoch of a single batch."""

    def __init__(
        self, trainer: pl.Trainer, server: RunsRounds, clock: LocalClock, min_steps: int | None, max_steps: int
    ) -> None:
        self.server, self.clock = server, clock
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.client_loop = server.client_loop(trainer)
        self.stage = IDLE
        self.collect_in(RoundResults(training=True))

    @property
    def global_step(self) -> int:
        """Number of rounds; while code of the module is executed, number of optimiser steps."""
        if not self.clock.running:
            return self.server.rounds_done
        return self.server.local_time + int(self.client_loop.steps_taken)

    @property
    def optimizer_steps(self) -> int:
        """Optimiser steps since this loop was made, as Lightning counts them."""
        return super().global_step

    @property
    def batch_idx(self) -> int:
        running, own = self.clock.running, self.clock.batch_idx
        return own if running and own is not None else super().batch_idx

    @property
    def max_steps(self) -> int:
        rounds = self._max_rounds
        return rounds * self.clock.steps if self.clock.running and rounds > 0 else rounds

    @max_steps.setter
    def max_steps(self, rounds: int) -> None:
        self._max_rounds = rounds

    def on_run_start(self, data_fetcher: Any) -> None:
        """Do nothing: there is no loader to prepare, because each visit makes its own."""

    def advance(self, data_fetcher: Any) -> None:
        trainer, results = self.trainer, results_of(self.trainer)
        self.val_loop.restarting = False
        self.batch_progress.is_last_batch = True
        self.batch_progress.increment_ready()
        results.complete = False
        cohort = self.server.begin_round(trainer)
        start_batch(trainer, None)
        call_callback_hooks(trainer, "on_train_batch_start", cohort, 0)
        self.batch_progress.increment_started()
        with trainer.profiler.profile("run_training_batch"), telling_of_errors(trainer, self.server.rounds_done):
            report = self.server.run_round(trainer, cohort)
        self.stage = TRAINED
        self.batch_progress.increment_processed()
        self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        results.complete = True
        call_callback_hooks(trainer, "on_train_batch_end", {"loss": torch.tensor(report.local_loss)}, cohort, 0)
        end_batch(trainer)
        self.batch_progress.increment_completed()

    def update_lr_schedulers(self, interval: str, update_plateau_schedulers: bool) -> None:
        if interval == "epoch":
            super().update_lr_schedulers(interval, update_plateau_schedulers)

    def is_accumulating(self) -> bool:
        return self.client_loop.visiting and not self.client_loop.stepping


class FederatedFitLoop(FitLoop):
    """Lightning's fit loop, counting rounds instead of epochs."""

    epoch_loop: RoundLoop

    def __init__(self, trainer: pl.Trainer, server: RunsRounds, min_epochs: int | None, max_epochs: int | None) -> None:
        self.server, self.clock = server, LocalClock(trainer, partial(server.most_batches, trainer))
        super().__init__(trainer, min_epochs=min_epochs, max_epochs=max_epochs)

    @classmethod
    def install(cls, trainer: pl.Trainer, server: RunsRounds) -> None:
        """Replace the trainer's fit loop by a federated one with the same limits, data source and validation."""
        old = trainer.fit_loop
        new = cls(trainer, server, old.min_epochs, old.max_epochs)
        new.epoch_loop = RoundLoop(trainer, server, new.clock, old.epoch_loop.min_steps, old.epoch_loop.max_steps)
        new.epoch_loop.val_loop = old.epoch_loop.val_loop
        new.take_data_from(old)
        trainer.fit_loop = new

    @property
    def max_batches(self) -> int | float:
        """1, because a round is one batch; while code of the module is executed, the batches of a visit."""
        return self.clock.batches if self.clock.running and self._max_batches else self._max_batches

    @max_batches.setter
    def max_batches(self, batches: int | float) -> None:
        self._max_batches = batches

    def run(self) -> None:
        with ended_by_sigterm(self.trainer):
            super().run()

    def setup_data(self) -> None:
        trainer = self.trainer
        if self.has_data() or trainer.limit_train_batches == 0:
            return
        self.set_one_batch()
        interval = trainer.val_check_interval
        if isinstance(interval, int) and interval > 1 and trainer.check_val_every_n_epoch is not None:
            raise ValueError(
                f"val_check_interval={interval} counts batches inside an epoch, and a round is one batch. To validate"
                f" every {interval} rounds use check_val_every_n_epoch={interval}, or add check_val_every_n_epoch=None."
            )
        trainer.val_check_batch = interval if isinstance(interval, int) else 1

    def reset(self) -> None:
        torch.set_grad_enabled(True)

    def on_run_start(self) -> None:
        stage = self.epoch_loop.stage
        super().on_run_start()
        self.epoch_loop.val_loop.restarting = False
        if stage != IDLE:
            self._finish_round(stage)

    def on_advance_start(self) -> None:
        seed_global(self.server.seed, self.server.rounds_done, "round")
        super().on_advance_start()

    def advance(self) -> None:
        with self.trainer.profiler.profile("run_training_epoch"):
            self.epoch_loop.run(NO_FETCHER)

    def on_advance_end(self) -> None:
        super().on_advance_end()
        self.server.note_round(self.trainer, ended=True)
        self.server.check_untouched(self.trainer)
        self.epoch_loop.stage = IDLE

    def on_save_checkpoint(self) -> dict[str, Any]:
        metrics = {name: value.detach().cpu() for name, value in self.trainer.callback_metrics.items()}
        rounds = {"rounds_done": self.server.rounds_done, "stage": self.epoch_loop.stage, "metrics": metrics}
        return {**super().on_save_checkpoint(), "federated": rounds}

    def load_state_dict(self, state_dict: dict[str, Any], prefix: str = "") -> None:
        """Rebuild every counter from the number of rounds and the stage of the last round."""
        saved = state_dict.get(prefix + "state_dict", {}).get("federated")
        self.server.resume(self.trainer, saved)
        assert saved is not None
        rounds, stage = saved["rounds_done"], saved["stage"]
        unfinished = stage != IDLE
        tracker: Any
        for tracker in (self.epoch_progress.total, self.epoch_progress.current):
            tracker.ready = tracker.started = rounds
            tracker.processed = rounds - (stage in (TRAINED, VALIDATED))
            tracker.completed = rounds - unfinished
        loop = self.epoch_loop
        loop.stage = stage
        loop.batch_progress.total.increment_by(rounds - loop.batch_progress.total.ready)
        loop.batch_progress.current.increment_by(unfinished - loop.batch_progress.current.ready)
        loop.batch_progress.is_last_batch = unfinished
        loop.count_batches_that_stepped(rounds - (stage == TRAINED))
        loop.val_loop.restarting = True  # only so that the sanity check is not run again
        self._saved_metrics = saved["metrics"] if unfinished else {}

    def _finish_round(self, stage: str) -> None:
        """Do the remaining stages of a round after its checkpoint: validate, end the epoch, step plateau schedulers."""
        restore_callback_metrics(self.trainer, self._saved_metrics)
        if stage == TRAINED:
            self.epoch_loop.on_advance_end(NO_FETCHER)
        if stage in (TRAINED, VALIDATED):
            self.on_advance_end()
            return
        self.epoch_progress.current.completed = self.server.rounds_done - 1
        self.epoch_loop.update_lr_schedulers("epoch", update_plateau_schedulers=True)
        self.epoch_progress.current.completed = self.server.rounds_done
        self.epoch_loop.stage = IDLE
