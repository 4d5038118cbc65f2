"""Default callbacks, unless the user supplied them."""

from __future__ import annotations

from collections.abc import Mapping
from math import ceil
from typing import Any

from lightning_fed.callbacks.console import is_screen
from lightning_fed.callbacks.evaluation import ClientEvaluation
from lightning_fed.callbacks.figure import FinalFigure
from lightning_fed.callbacks.progress import FederatedProgressBar
from lightning_fed.callbacks.rich_progress import FederatedRichProgressBar
from lightning_fed.callbacks.tolerance import LocalTolerance
from lightning_fed.lightning import (
    Checkpoint,
    ModelCheckpoint,
    RichProgressBar,
    TQDMProgressBar,
    leaves_bar,
    pl,
)


def add_figure(trainer: pl.Trainer, module: pl.LightningModule) -> None:
    """Add the figure after the evaluation, so that it has what is evaluated when the fit ends."""
    if not trainer.fast_dev_run and not trainer.barebones:
        _add(trainer, module, FinalFigure)


def equip(
    trainer: pl.Trainer,
    module: pl.LightningModule,
    evaluate_every: int,
    has_tolerance: bool,
    settings: Mapping[str, Any],
) -> None:
    """Add evaluation, replace the stock progress bar by one over clients, keep a last checkpoint, log the settings."""
    if evaluate_every and not trainer.barebones:
        _add(trainer, module, ClientEvaluation, every_n_rounds=evaluate_every)
    if has_tolerance and not trainer.barebones:
        _add(trainer, module, LocalTolerance)
    for i, callback in enumerate(trainer.callbacks):
        if type(callback) in (TQDMProgressBar, RichProgressBar):
            bar = _over_clients(callback)
            bar.setup(trainer, module, "fit")
            trainer.callbacks[i] = bar
        if isinstance(callback, ModelCheckpoint) and trainer.fast_dev_run:
            callback.save_last = False  # a later run must not resume from it
        elif type(callback) is ModelCheckpoint and callback.monitor is None and callback.save_last is None:
            callback.save_last = "link"  # the trainer's own default keeps no "last" to resume from
    for logger in trainer.loggers:
        logger.log_hyperparams(dict(settings))


def _over_clients(bar: TQDMProgressBar | RichProgressBar) -> FederatedProgressBar | FederatedRichProgressBar:
    """The bar over clients of the same look and settings; one that prints lines where there is no terminal."""
    if isinstance(bar, RichProgressBar) and is_screen():
        rich = FederatedRichProgressBar()
        vars(rich).update(vars(bar))
        return rich
    return FederatedProgressBar(ceil(bar.refresh_rate), getattr(bar, "process_position", 0), leaves_bar(bar))


def _add(trainer: pl.Trainer, module: pl.LightningModule, kind: type[pl.Callback], **kwargs: Any) -> None:
    """Add a callback before the checkpoints, which Lightning keeps last so that they see the state of all callbacks."""
    if any(isinstance(callback, kind) for callback in trainer.callbacks):
        return
    callback = kind(**kwargs)
    callback.log, callback.log_dict = module.log, module.log_dict
    checkpoints = [i for i, c in enumerate(trainer.callbacks) if isinstance(c, Checkpoint)]
    trainer.callbacks.insert(checkpoints[0] if checkpoints else len(trainer.callbacks), callback)
