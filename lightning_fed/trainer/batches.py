"""Move batches to the device of the module."""

from __future__ import annotations

from typing import Any

from lightning_fed.lightning import before_transfer, call_strategy_hook, pl


def move_batch(trainer: pl.Trainer, batch: Any) -> Any:
    """Convert a batch and move it to the device, through the module's and the datamodule's transfer hooks."""
    batch = trainer.precision_plugin.convert_input(batch)
    batch = before_transfer(trainer.lightning_module, batch)
    return call_strategy_hook(trainer, "batch_to_device", batch, dataloader_idx=0)
