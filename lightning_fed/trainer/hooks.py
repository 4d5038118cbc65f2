"""Hooks of a federation, beside Lightning's own."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytorch_lightning as pl
import torch

if TYPE_CHECKING:
    from lightning_fed.core.algorithm import Reply
    from lightning_fed.local.client_loop import Visit
    from lightning_fed.server import RoundReport


class FederatedCallback(pl.Callback):
    """A Lightning callback that is also told about rounds and visits.

    Lightning's own hooks fire as well: ``on_train_epoch_start``, ``on_train_batch_start`` and their ends once per
    round, gradient hooks such as ``on_before_optimizer_step`` once per local step.
    """

    def log_round(self, metrics: dict[str, float]) -> None:
        """Log numbers about a round in full precision; what is not a number is left out."""
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items() if value == value}
        self.log_dict(known, batch_size=1)

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        """Before the first client of a round; the module holds the server's model."""

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit) -> None:
        """Before a client's local work."""

    def on_client_step(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit) -> None:
        """After each local batch; ``visit.step`` and ``visit.loss`` tell how it goes."""

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit, reply: Reply[Any, Any]
    ) -> None:
        """After a client's local work; the module holds the client's model. Nothing is committed yet."""

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        """After the round is committed; the module holds the server's new model. May log with ``self.log``."""


def listening(trainer: pl.Trainer, hook: str) -> list[Any]:
    """The callbacks that do something in a federated hook."""
    nothing = getattr(FederatedCallback, hook)
    return [callback for callback in trainer.callbacks if getattr(type(callback), hook, nothing) is not nothing]


def notify(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a federated hook on every callback that has it."""
    for callback in listening(trainer, hook):
        getattr(callback, hook)(trainer, trainer.lightning_module, *args)
