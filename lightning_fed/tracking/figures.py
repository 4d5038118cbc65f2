"""Figures, in the form of each logger."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from lightning_fed.lightning import CometLogger, Logger, MLFlowLogger, TensorBoardLogger, WandbLogger
from lightning_fed.tracking.folders import file_of, folder_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure


def log_figure(loggers: Sequence[Logger], name: str, figure: Figure, step: int) -> list[Path]:
    """Log a figure, as an image in W&B, TensorBoard, MLflow and Comet, and as a PNG in the folder of each logger.

    Returns the PNG files. A logger that writes no local files has no folder.

    >>> import tempfile
    >>> from matplotlib.figure import Figure
    >>> from lightning_fed.lightning import CSVLogger
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     logger = CSVLogger(folder)
    ...     [path.name for path in log_figure([logger], "curves/loss", Figure(figsize=(1, 1)), step=3)]
    ['curves_loss.png']
    """
    written = []
    for logger in loggers:
        if isinstance(logger, WandbLogger):
            import wandb

            logger.experiment.log({name: wandb.Image(figure), "trainer/global_step": step})
        elif isinstance(logger, TensorBoardLogger):
            logger.experiment.add_figure(name, figure, step, close=False)
        elif isinstance(logger, MLFlowLogger):
            logger.experiment.log_figure(logger.run_id, figure, f"{name}.png")
        elif isinstance(logger, CometLogger):
            logger.experiment.log_figure(name, figure, step=step)
        if (folder := folder_of(logger)) is not None:
            written.append(file_of(folder, name, "png"))
            figure.savefig(written[-1], dpi=120)
    return written
