"""Progress over rounds and clients: a bar on a terminal, one line per round elsewhere."""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

from tqdm import tqdm
from tqdm.contrib.logging import logging_redirect_tqdm

from lightning_fed.callbacks.console import console_loggers, is_screen
from lightning_fed.core.labels import label_of
from lightning_fed.core.messages import Reply
from lightning_fed.lightning import TQDMProgressBar, leaves_bar, pl
from lightning_fed.trainer.hooks import FederatedCallback, Visit


class RoundBar(FederatedCallback):
    """Follows rounds and visits; a bar says how to show them."""

    reads_module = False
    _visit: Visit | None = None
    _shown = 0.0

    def begin_round(self, title: str, visits: int) -> None:
        """Show an empty bar for the visits of a round."""
        raise NotImplementedError

    def show(self, text: str) -> None:
        """Show text about the current visit."""
        raise NotImplementedError

    def advance(self) -> None:
        """Count a visit that has ended."""
        raise NotImplementedError

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self._visit = None
        self.begin_round(title_of(trainer, round), len(cohort) * trainer.fit_loop.server.algorithm.traits.exchanges)

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
        self.advance()

    def on_train_batch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule, *_: Any) -> None:
        """The bar counts clients, not Lightning's one batch per round."""

    def _show(self) -> None:
        if self.is_disabled or (visit := self._visit) is None:
            return
        loss = "" if visit.loss is None else f", loss {float(visit.loss):.4g}"
        planned = f"/{visit.planned}" if visit.planned else ""
        self.show(f"client {label_of(visit.client)}, step {visit.step}{planned}{loss}")
        self._shown = time.monotonic()


class FederatedProgressBar(RoundBar, TQDMProgressBar):
    """Shows the round, the visited client, its step and its loss; the bar counts the clients of the round.

    Where the output is no terminal, prints a line at the end of each round instead.

    ``FederatedServer`` puts it in the place of Lightning's bar. To set it up yourself, add it to the callbacks:

    >>> import pytorch_lightning as pl
    >>> bar = FederatedProgressBar(refresh_rate=10)
    >>> trainer = pl.Trainer(callbacks=[bar], logger=False, enable_checkpointing=False)
    >>> trainer.progress_bar_callback is bar
    True
    """

    def __init__(self, refresh_rate: int = 1, process_position: int = 0, leave: bool = False) -> None:
        super().__init__(refresh_rate, process_position, leave)
        self._lines, self._began = False, 0.0
        self._title = ""
        self._apart = ExitStack()

    @property
    def is_enabled(self) -> bool:
        """Whether bars are drawn: not where lines are printed in their place."""
        return super().is_enabled and not self._lines

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        self._lines = stage == "fit" and not is_screen()

    def teardown(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._apart.close()

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        self._apart.close()

    def on_train_start(self, *args: Any) -> None:
        super().on_train_start(*args)
        if self.is_enabled:
            self._apart.enter_context(messages_above_bars())

    def on_train_epoch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        self._visit, self._began = None, time.monotonic()
        if leaves_bar(self):
            self.train_progress_bar = self.init_train_tqdm()

    def begin_round(self, title: str, visits: int) -> None:
        self._title = title
        self.train_progress_bar.reset(total=visits)
        self.train_progress_bar.set_description(title)

    def show(self, text: str) -> None:
        self.train_progress_bar.set_postfix_str(text)

    def advance(self) -> None:
        self.train_progress_bar.update()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = with_results(trainer, self.get_metrics(trainer, pl_module))
        if self._lines and super().is_enabled:
            self._print_line(len(trainer.fit_loop.server.report.cohort), metrics)
        self.train_progress_bar.set_postfix(metrics)
        if leaves_bar(self):
            self.train_progress_bar.close()

    def _print_line(self, clients: int, metrics: dict[str, Any]) -> None:
        words = [f"{clients} client{'' if clients == 1 else 's'}", f"{time.monotonic() - self._began:.1f} s"]
        for name, value in metrics.items():
            if name != "v_num":  # the logger's run, which would stand in every line
                words.append(f"{name}={value if isinstance(value, (str, int)) else f'{value:.4g}'}")
        print(f"{self._title}: {', '.join(words)}", flush=True)


def title_of(trainer: pl.Trainer, round: int) -> str:
    limits = [limit for limit in (trainer.max_epochs, trainer.max_steps) if limit is not None and limit >= 0]
    return f"Round {round + 1}/{min(limits) if limits else '?'}"


def with_results(trainer: pl.Trainer, metrics: dict[str, Any]) -> dict[str, Any]:
    """What the module shows in a bar, after the objective and, unless it shows an accuracy itself, the held-out one."""
    names = ["objective"]
    if not any("acc" in name.lower() for name in metrics):
        names += ["val_accuracy", "test_accuracy"]
    found = {name: trainer.callback_metrics.get(f"federated/{name}") for name in names}
    return {name: f"{float(value):.4g}" for name, value in found.items() if value is not None} | metrics


@contextmanager
def messages_above_bars() -> Iterator[None]:
    """Write log lines and warnings on lines of their own, above tqdm's bars."""
    before = warnings.showwarning

    def show(*args: Any, **kwargs: Any) -> None:
        with tqdm.external_write_mode(file=sys.stderr):
            before(*args, **kwargs)

    warnings.showwarning = show
    try:
        with logging_redirect_tqdm(console_loggers()):
            yield
    finally:
        if warnings.showwarning is show:  # not if others have replaced or restored it meanwhile
            warnings.showwarning = before
