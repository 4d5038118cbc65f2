"""Check by what models are chosen: by early stopping, a best checkpoint or pruning."""

from __future__ import annotations

import re
import warnings
from collections.abc import Collection, Iterator
from typing import Any

from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.validation_share import VAL_FRACTION
from lightning_fed.lightning import epochs_between_looks, is_overridden, pl

#: Names of metrics of test data: of ``ClientEvaluation``, and those that ``tune`` refuses.
TEST = re.compile(r"^(federated/)?test([\W_]|$)", re.IGNORECASE)
#: Names that modules usually give to metrics of ``validation_step``.
VALIDATION = re.compile(r"^(val|valid|validation|eval)([\W_]|$)", re.IGNORECASE)
#: Metrics that are measured by the evaluation of all clients alone.
EVALUATED = re.compile(r"^federated/(objective|primal_residual|(train|val|test)_)")


class ModelChoice:
    """Tells once of each callback that chooses a model by test data.

    A callback chooses if it has a ``monitor``: ``EarlyStopping``, ``ModelCheckpoint``, ``OptunaPruning`` and others.
    Metrics of validation are metrics of test data if the data have no validation split, because validation then reads
    the test split. Which these are, their names say before validation has run, and validation itself afterwards.
    """

    def __init__(self) -> None:
        self._told: set[int] = set()

    def check(self, trainer: pl.Trainer, validated: Collection[str] = ()) -> None:
        """Warn of callbacks that have not been told of; ``validated`` are the metrics that validation has logged."""
        instead = _validates_test_data(trainer)
        for callback, name in monitors(trainer):
            if id(callback) in self._told:
                continue
            own = TEST.search(name)
            if own or (instead and (name in validated or VALIDATION.search(name))):
                self._told.add(id(callback))
                _warn(callback, name, None if own else trainer.datamodule)


def monitors(trainer: pl.Trainer) -> Iterator[tuple[Any, str]]:
    """Callbacks that choose by a metric, and its name."""
    for callback in trainer.callbacks:
        if isinstance(name := getattr(callback, "monitor", None), str):
            yield callback, name


def check_monitored(trainer: pl.Trainer, evaluate_every: int) -> None:
    """Refuse a callback that reads a metric in rounds that do not measure it: it would fail, or take an old value."""
    if evaluate_every == 1:
        return
    for callback, name in monitors(trainer):
        looks, validations = epochs_between_looks(callback), trainer.check_val_every_n_epoch or 1
        reads = looks and (not evaluate_every or (looks % evaluate_every and validations % evaluate_every))
        if EVALUATED.search(name) and reads:
            rarely = f"every {evaluate_every} rounds" if evaluate_every else "never"
            cure = f", or ModelCheckpoint(every_n_epochs={evaluate_every})" if evaluate_every else ""
            raise ValueError(
                f"{type(callback).__name__} reads {name!r} every {looks} rounds, but clients are evaluated"
                f" {rarely} (evaluate_every={evaluate_every}). Use FederatedServer(evaluate_every={looks}){cure}."
            )


def is_of_validation(name: str) -> bool:
    """Whether the name of a metric says that it is one of validation data.

    >>> [is_of_validation(name) for name in ("val_loss", "federated/val_f1_worst", "federated/objective", "valence")]
    [True, True, False, False]
    """
    return VALIDATION.search(name.removeprefix("federated/")) is not None


def needs_validation(trainer: pl.Trainer) -> list[tuple[Any, str]]:
    """Callbacks that choose by a metric of validation data, and its name."""
    return [(callback, name) for callback, name in monitors(trainer) if is_of_validation(name)]


def _validates_test_data(trainer: pl.Trainer) -> bool:
    """Whether Lightning's validation reads the test split, because there is no other."""
    data: Any = trainer.datamodule
    if data.has_split("val") or not data.has_split("test") or not trainer.limit_val_batches:
        return False
    return not is_overridden("val_dataloader", data, FederatedDataModule)  # a subclass may have validation data there


def _warn(callback: Any, name: str, data: Any) -> None:
    why = "a metric of the test data"
    if data is not None:
        why = "measured on the test data: the data have no validation split, and validation then reads the test split"
    share = f"{VAL_FRACTION:g}"
    warnings.warn(
        f"{type(callback).__name__} chooses by {name!r}, which is {why}. What is chosen by test data looks better on"
        f" them than it is. Hold out validation data: val={share} of FederatedDataModule, val_fraction={share} of"
        f' from_dataset or of our data, or set_split("val", ...); then monitor "federated/val_loss" or another metric'
        " of validation (docs/howto/validation.md).",
        stacklevel=2,
    )
