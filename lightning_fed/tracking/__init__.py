"""Trackers: Weights & Biases, online or offline; tables and figures for every logger."""

from lightning_fed.tracking.figures import log_figure
from lightning_fed.tracking.tables import log_table
from lightning_fed.tracking.wandb import AutoWandbLogger, has_wandb_key

__all__ = ["AutoWandbLogger", "has_wandb_key", "log_figure", "log_table"]
