"""Counters of steps and epochs as a module sees them during a visit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_fed.lightning import pl


class LocalClock:
    """While the clock runs, counts as a plain ``Trainer(max_epochs=rounds, limit_train_batches=T)`` would.

    T is one number for the whole run: the batches of ``local_steps``, or the most that any client's local epochs have.
    Loggers, checkpoints and callbacks count rounds, so the clock runs only while code of the module is executed.

    Args:
        most_batches: computes T, in batches.
    """

    def __init__(self, trainer: pl.Trainer, most_batches: Callable[[], int]) -> None:
        self.trainer, self._most_batches = trainer, most_batches
        self.running = False
        self.batch_idx: int | None = None  # index of the current batch in a visit
        self._batches: int | None = None

    @property
    def batches(self) -> int:
        """T, in batches."""
        if self._batches is None:
            self._batches = self._most_batches()
        return self._batches

    @property
    def steps(self) -> int:
        """T, in steps of the optimiser."""
        return -(-self.batches // self.trainer.accumulate_grad_batches)

    def prepare(self) -> None:
        """Start the clock until the fit begins, so that schedules over all local steps can be set up."""
        self._batches, self.running = None, True

    @contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """Start or stop the clock inside a with block."""
        before, self.running = self.running, on
        try:
            yield
        finally:
            self.running = before


def local_time(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Run a federated trainer's clock inside a with block, for code of the module; does nothing in other trainers."""
    clock: LocalClock | None = getattr(trainer.fit_loop, "clock", None)
    return nullcontext() if clock is None else clock.turned(True)
