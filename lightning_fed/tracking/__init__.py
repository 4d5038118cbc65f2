"""Trackers: Weights & Biases, online or offline."""

from lightning_fed.tracking.wandb import AutoWandbLogger, has_wandb_key, log_figure, log_table

__all__ = ["AutoWandbLogger", "has_wandb_key", "log_figure", "log_table"]
