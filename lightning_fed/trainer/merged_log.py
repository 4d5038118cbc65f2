"""Merge values that a worker or a stack logged into the log of the round."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.lightning import enter_hook, note_merged, pl
from lightning_fed.trainer.loops import RoundResults

#: Arguments of ``LightningModule.log`` to keep. Lightning's other metadata refers to the trainer, so it is dropped.
_ARGUMENTS = (
    "name",
    "prog_bar",
    "logger",
    "on_step",
    "on_epoch",
    "reduce_fx",
    "add_dataloader_idx",
    "metric_attribute",
)


@dataclass(frozen=True, eq=False)
class Logged:
    """Values that the module logged: arguments of ``log``, mean or sum of the numbers (None for a metric), and weight.

    ``metrics`` holds the states of updated metrics by name.
    """

    values: list[tuple[dict[str, Any], Tensor | None, int | None]]
    metrics: dict[str, dict[str, Any]]

    @classmethod
    def of(cls, results: RoundResults, module: pl.LightningModule) -> Logged:
        values: list[tuple[dict[str, Any], Tensor | None, int | None]] = []
        for metric in results.values():
            how = {name: getattr(metric.meta, name) for name in _ARGUMENTS}
            if not metric.is_tensor:
                values.append((how, None, None))
            elif metric.meta.is_mean_reduction:
                weight = int(metric.cumulated_batch_size)
                values.append((how, metric.value / weight, weight))
            else:
                values.append((how, metric.value, None))
        updated = {n: m for n, m in module.named_modules() if isinstance(m, Metric) and m.update_called}
        return cls(values, {name: dict(metric.metric_state) for name, metric in updated.items()})

    def put_into(self, trainer: pl.Trainer) -> None:
        """Log the values in this trainer, as if its module had logged them."""
        module = trainer.lightning_module
        modules = dict(module.named_modules())
        for name, state in self.metrics.items():
            _merge(modules[name], state)
        enter_hook(module, "training_step")
        for how, value, weight in self.values:
            module.log(value=modules[how["metric_attribute"]] if value is None else value, batch_size=weight, **how)


def _merge(metric: Metric, state: dict[str, Any]) -> None:
    """Merge the state of another metric into ``metric``."""
    if metric.update_called:
        metric.merge_state(state)
    else:
        for name, value in state.items():
            setattr(metric, name, [t.clone() for t in value] if isinstance(value, list) else torch.clone(value))
    note_merged(metric)
