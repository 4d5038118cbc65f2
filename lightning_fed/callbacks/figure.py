from __future__ import annotations

from pathlib import Path
from typing import Any

from lightning_fed.callbacks.captions import caption
from lightning_fed.callbacks.curves import draw
from lightning_fed.core.table import Table
from lightning_fed.data.survey import title_of
from lightning_fed.lightning import pl, rank_zero_info
from lightning_fed.tracking.figures import log_figure
from lightning_fed.trainer.hooks import is_server


class FinalFigure(pl.Callback):
    """Draws the metrics of all rounds (``server.history``) when the fit ends, and tells where the file is.

    It draws loss and accuracy, and up to four further metrics, each with a band to its worst decile of clients. An axis
    above counts megabytes; if rounds send unlike amounts, there are panels by megabytes too. The heading names the
    data, the line below the panels the algorithm, clients per round, local work, rounds and seed.

    Args:
        path: PNG file for the figure, in addition to the loggers.
        title: heading of the figure, above the description of the data; by default the algorithm on these data.

    >>> import pytorch_lightning as pl
    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> from lightning_fed import FederatedDataModule, FederatedServer
    >>> from lightning_fed.algorithms import FedAvg
    >>> from lightning_fed.models import MLP
    >>> data = FederatedDataModule({"ann": TensorDataset(torch.eye(2), torch.tensor([0, 1]))}, batch_size=2)
    >>> quiet = dict.fromkeys(["logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"], False)
    >>> server, figure = FederatedServer(FedAvg()), FinalFigure()
    >>> trainer = pl.Trainer(max_epochs=3, callbacks=[server, figure], **quiet)
    >>> trainer.fit(MLP((2, 2), lr=1.0), datamodule=data)
    >>> [row["round"] for row in figure.history]
    [0, 1, 2]
    >>> figure.history[2]["federated/objective"] < figure.history[0]["federated/objective"]
    True
    """

    def __init__(self, path: str | Path | None = None, title: str | None = None) -> None:
        self.path = None if path is None else Path(path)
        self.title = title
        self._server: Any = None

    @property
    def history(self) -> Table:
        """``server.history``, which the figure draws."""
        return Table() if self._server is None else self._server.history

    def setup(self, trainer: pl.Trainer, pl_module: pl.LightningModule, stage: str) -> None:
        self._server = next((callback for callback in trainer.callbacks if is_server(callback)), None)

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._finish(trainer)

    def on_exception(self, trainer: pl.Trainer, pl_module: pl.LightningModule, exception: BaseException) -> None:
        if trainer.state.fn == "fit":
            self._finish(trainer)

    def _finish(self, trainer: pl.Trainer) -> None:
        if not trainer.is_global_zero or not self.history or not (self.path or trainer.loggers):
            return
        data: Any = trainer.datamodule
        named = title_of(data)
        title = (
            f"{type(self._server.algorithm).__name__} on {named}" if self.title is None else f"{self.title}\n{named}"
        )
        settings = caption(self._server, len(data.client_ids), len(self.history))
        figure = draw(self.history, title, settings)
        written = log_figure(trainer.loggers, "federated/figure", figure, int(self.history[-1]["round"]))
        if self.path is not None:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            figure.savefig(self.path, dpi=120)
            written = [self.path, *written]
        if written:
            rank_zero_info(f"Figure: {', '.join(map(str, written))}")
