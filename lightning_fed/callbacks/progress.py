from __future__ import annotations

import time
from typing import Any

from lightning_fed.core.labels import label_of
from lightning_fed.core.messages import Reply
from lightning_fed.lightning import TQDMProgressBar, leaves_bar, pl
from lightning_fed.trainer.hooks import FederatedCallback, Visit


class FederatedProgressBar(TQDMProgressBar, FederatedCallback):
    """Shows the round, the visited client, its step and its loss; the bar counts the clients of the round."""

    reads_module = False

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, process_position, leave)
        self._visit: Visit | None = None
        self._shown = 0.0

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._visit = None
        if leaves_bar(self):
            self.train_progress_bar = self.init_train_tqdm()

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self.train_progress_bar.reset(total=len(cohort) * trainer.fit_loop.server.algorithm.traits.exchanges)
        self.train_progress_bar.set_description(f"Round {round + 1}/{_rounds(trainer)}")

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit) -> None:
        self._visit = visit
        self._show()

    def on_client_step(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit) -> None:
        if time.monotonic() - self._shown > 0.2:
            self._show()

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit, reply: Reply[Any, Any]
    ) -> None:
        self._visit = visit
        self._show()
        self.train_progress_bar.update()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The bar counts clients, not Lightning's one batch per round."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        objective = trainer.callback_metrics.get("federated/objective")
        known = {} if objective is None else {"objective": f"{float(objective):.4g}"}
        self.train_progress_bar.set_postfix({**known, **self.get_metrics(trainer, pl_module)})
        if leaves_bar(self):
            self.train_progress_bar.close()

    def _show(self) -> None:
        if self.is_disabled or (visit := self._visit) is None:
            return
        loss = "" if visit.loss is None else f", loss {float(visit.loss):.4g}"
        planned = f"/{visit.planned}" if visit.planned else ""
        self.train_progress_bar.set_postfix_str(f"client {label_of(visit.client)}, step {visit.step}{planned}{loss}")
        self._shown = time.monotonic()


def _rounds(trainer: pl.Trainer) -> str:
    limits = [limit for limit in (trainer.max_epochs, trainer.max_steps) if limit is not None and limit >= 0]
    return str(min(limits)) if limits else "?"
