"""Commands that choose by validation data hold out a share of the training data, if there are no others."""

from __future__ import annotations

import sys
from collections.abc import Callable

from lightning_fed.data.validation_share import VAL_FRACTION
from lightning_fed.lightning import pl
from lightning_fed.trainer.model_choice import needs_validation


def tell(line: str) -> None:
    """Write a line to standard error."""
    print(line, file=sys.stderr, flush=True)


class HoldOut(pl.Callback):
    """Holds out validation data before the federation is set up, unless the data have a validation split; says so.

    Args:
        why: who chooses, and by which metric.
        fraction: share of every client's training samples.
        tell: is given the line that says so.
    """

    def __init__(self, why: str, fraction: float = VAL_FRACTION, tell: Callable[[str], None] = tell) -> None:
        self.why, self.fraction, self.tell = why, fraction, tell

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        data = trainer.datamodule
        if stage != "fit" or data.has_split("val"):
            return
        data.hold_out_validation(self.fraction)
        self.tell(
            f"{self.why}, and the data have no validation split: every client holds out {self.fraction:.0%} of its"
            " training samples (docs/howto/validation.md)."
        )


def hold_out_where_needed(trainer: pl.Trainer) -> None:
    """Add :class:`HoldOut`, in front of all callbacks, if one of them chooses by a metric of validation data."""
    for callback, name in needs_validation(trainer)[:1]:
        trainer.callbacks.insert(0, HoldOut(f"{type(callback).__name__} chooses by {name!r}"))
