"""Time as a module sees it while it works for a client."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

from lightning_fed.lightning import pl


class LocalClock:
    """Counts as a plain ``Trainer(max_epochs=rounds, limit_train_batches=T)`` would, while it runs.

    T is one number for the whole run: the batches of ``local_steps``, or the most that any client's local epochs have.
    Loggers, checkpoints and callbacks count rounds, so the clock runs only while code of the module is at work.

    Args:
        most_batches: gives T, in batches.
    """

    def __init__(self, trainer: pl.Trainer, most_batches: Callable[[], int]) -> None:
        self.trainer, self._most_batches = trainer, most_batches
        self.running = False
        self.batch_idx: int | None = None  # of the batch at work in a visit
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
        """Run from here to the start of the fit, so that schedules over all local steps can be set up."""
        self._batches, self.running = None, True

    @contextmanager
    def turned(self, on: bool) -> Iterator[None]:
        """Run, or stand still, for a while."""
        before, self.running = self.running, on
        try:
            yield
        finally:
            self.running = before


def local_time(trainer: pl.Trainer) -> AbstractContextManager[None]:
    """Let a federated trainer's clock run while code of the module is at work; nothing in other trainers."""
    clock: LocalClock | None = getattr(trainer.fit_loop, "clock", None)
    return nullcontext() if clock is None else clock.turned(True)
