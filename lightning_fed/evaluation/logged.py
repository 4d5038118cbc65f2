"""Values of the metrics that a module logs while it is evaluated on one client's data."""

from __future__ import annotations

import logging
import math
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from torch import Tensor
from torchmetrics import Metric, MetricCollection

from lightning_fed.core.memory import ClientId
from lightning_fed.evaluation.results import Evaluation, stated_directions
from lightning_fed.lightning import pl

if TYPE_CHECKING:
    from lightning_fed.trainer.loops import RoundResults

log = logging.getLogger(__name__)

_TOLD: WeakKeyDictionary[pl.LightningModule, set[str]] = WeakKeyDictionary()


def reset_metrics(module: pl.LightningModule) -> None:
    """Have all metrics of a module forget what they have seen."""
    kinds: tuple[type, ...] = (Metric, MetricCollection)  # collections last: their members share states
    for kind in kinds:
        for part in module.modules():
            if isinstance(part, kind):
                part.reset()  # type: ignore[operator]


def evaluation_of(
    results: RoundResults, module: pl.LightningModule, returned: float | None, cid: ClientId, examples: int
) -> Evaluation:
    """The evaluation of a client from the loss that the step returned, if any, and from what it logged."""
    found: dict[str, float] = {}
    for metric in results.values():
        name = metric.meta.name
        try:
            value = number_of(metric.compute())
        except Exception as error:  # a metric need not exist for every client: R2 takes two samples
            why = f"has no value for client {cid!r}: {type(error).__name__}: {error}. Such cells stay blank."
            _tell_once(module, name, why)
            value = math.nan
        if value is None:
            _tell_once(module, name, "is left out: its value is not a single number.")
        else:
            found[name] = value
    metrics = {metric.meta.name: metric.value for metric in results.values() if not metric.is_tensor}
    return Evaluation.of(returned, found, examples, stated_directions(metrics))


def number_of(value: Any) -> float | None:
    """A metric's value as a number; None if it is not a single number."""
    if isinstance(value, Tensor):
        return float(value) if value.numel() == 1 else None
    return float(value) if isinstance(value, int | float) else None


def _tell_once(module: pl.LightningModule, name: str, text: str) -> None:
    told = _TOLD.setdefault(module, set())
    if name not in told:
        told.add(name)
        log.info("Metric %r of %s %s", name, type(module).__name__, text)
