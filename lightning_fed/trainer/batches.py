"""A batch on its way to the module."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl

from lightning_fed.trainer.private import call_strategy_hook


def move_batch(trainer: pl.Trainer, batch: Any) -> Any:
    """A batch on its way to the device, through the module's and the datamodule's transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = trainer.lightning_module._on_before_batch_transfer(batch, dataloader_idx=0)
    return call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
