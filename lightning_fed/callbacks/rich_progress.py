"""The rich bar of a federation."""

from __future__ import annotations

import sys
from typing import Any

from lightning_fed.callbacks.console import behind, console_handlers, console_loggers
from lightning_fed.callbacks.progress import RoundBar, objective_of, title_of
from lightning_fed.lightning import RichBar, pl


class FederatedRichProgressBar(RoundBar, RichBar):
    """As ``FederatedProgressBar``, drawn by rich, on a terminal; takes the arguments of ``RichProgressBar``.

    >>> import pytorch_lightning as pl
    >>> bar = FederatedRichProgressBar(refresh_rate=10)
    >>> trainer = pl.Trainer(callbacks=[bar], logger=False, enable_checkpointing=False)
    >>> trainer.progress_bar_callback is bar
    True
    """

    def describe(self, epoch: int) -> str:
        """The title of the bar of a round."""
        return title_of(self.trainer, epoch)

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        # rich has replaced the standard streams by ones that write above its bars; loggers still have the old ones
        self._moved = [
            (handler, handler.stream)
            for logger in console_loggers()
            for handler in console_handlers(logger)
            if "stream" in vars(handler)  # others, such as logging's last resort, look the stream up themselves
        ]
        for handler, stream in self._moved:
            handler.setStream(sys.stdout if stream is behind(sys.stdout) else sys.stderr)

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._give_back_streams()
        super().teardown(trainer, pl_module, stage)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._give_back_streams()
        super().on_exception(trainer, pl_module, exception)

    def _give_back_streams(self) -> None:
        for handler, stream in self.__dict__.pop("_moved", ()):
            handler.setStream(stream)

    def begin_round(self, title: str, visits: int) -> None:
        self._title = title
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.progress.reset(self.train_progress_bar_id, total=visits, description=title)
            # the time from which rich counts the speed: visits of a stack all end at once
            self.progress.advance(self.train_progress_bar_id, 0)

    def show(self, text: str) -> None:
        if self.progress is not None and self.train_progress_bar_id is not None:
            safe = text.replace("[", r"\[")  # a label may look like rich's markup
            self.progress.update(self.train_progress_bar_id, description=f"{self._title}, {safe}")

    def advance(self) -> None:
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.progress.update(self.train_progress_bar_id, advance=1)
            self.refresh()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if self.progress is not None and self.train_progress_bar_id is not None:
            self.progress.update(self.train_progress_bar_id, description=self._title)  # room for the metrics
        super().on_train_epoch_end(trainer, pl_module)

    def get_metrics(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> dict[str, Any]:
        return {**objective_of(trainer), **super().get_metrics(trainer, pl_module)}
