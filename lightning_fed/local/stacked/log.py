"""Collect the values that the steps of a stack log, and replay them to Lightning."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor
from torchmetrics import MeanAbsoluteError, MeanSquaredError, Metric
from torchmetrics.classification import MulticlassConfusionMatrix, MulticlassStatScores

from lightning_fed.lightning import enter_hook, pl
from lightning_fed.local.stacked.pure_step import Outline

#: Metrics whose states are sums over samples: one update with many batches equals one update with each batch. (Binary
#: and multilabel metrics are not: they inspect a whole batch to tell probabilities from scores.)
ADDITIVE = (MulticlassConfusionMatrix, MulticlassStatScores, MeanAbsoluteError, MeanSquaredError)


def is_additive(metric: Metric) -> bool:
    """Whether a metric keeps only sums over samples; False for a user's subclass, which may keep anything."""
    own = not type(metric).__module__.startswith("torchmetrics.")
    return isinstance(metric, ADDITIVE) and not own and getattr(metric, "multidim_average", "global") == "global"


@dataclass(frozen=True, eq=False)
class _Noted:
    """Values noted by K steps on batches of one size: their clients, their step numbers, and tensors (K, ...)."""

    outline: Outline
    clients: NDArray[Any]
    steps: NDArray[Any]
    size: int
    values: list[Tensor]


class StepLog:
    """Values that the steps of a stack logged, passed to Lightning once per stack.

    Each batch is weighted by the ``batch_size`` that it was logged with, and reduced by its ``reduce_fx``. Metrics are
    updated batch by batch, one client after another, unless they are sums over samples.
    """

    def __init__(self) -> None:
        self._noted: list[_Noted] = []

    def note(
        self, outline: Outline, clients: NDArray[Any], steps: NDArray[Any], size: int, values: Sequence[Tensor]
    ) -> None:
        """Copy the values that steps noted, because the next batches overwrite their memory."""
        if outline.logged or outline.updates:
            self._noted.append(_Noted(outline, clients, steps, size, [value.clone() for value in values]))

    def replay(self, trainer: pl.Trainer) -> None:
        module = trainer.lightning_module
        enter_hook(module, "training_step")
        # update metrics first: a step also updates a metric before it logs the metric
        for metric in {id(m): m for noted in self._noted for m, _ in noted.outline.updates}.values():
            self._update(metric)
        for name in {name: None for noted in self._noted for name in noted.outline.logged}:
            self._log(module, name)

    def _log(self, module: pl.LightningModule, name: str) -> None:
        mine = [noted for noted in self._noted if name in noted.outline.logged]
        entry = mine[0].outline.logged[name]
        if isinstance(entry.known, Metric):
            return module.log(name, entry.known, batch_size=1, **entry.kwargs)
        values = torch.cat([_values(noted, name) for noted in mine])
        sizes = torch.cat([torch.full((len(n.clients),), _batch_size(n, name), dtype=torch.float64) for n in mine])
        reduced = {
            "mean": (values * sizes).sum() / sizes.sum(),
            "sum": values.sum(),
            "min": values.min(),
            "max": values.max(),
        }
        module.log(name, float(reduced[entry.reduction]), batch_size=int(sizes.sum()), **entry.kwargs)

    def _update(self, metric: Metric) -> None:
        numbered = [(noted, enumerate(_arguments(noted, metric))) for noted in self._noted]
        calls = [(noted, number, args) for noted, each in numbered for number, args in each]
        if is_additive(metric) and all(arg.ndim > 1 for _, _, args in calls for arg in args):
            for _, _, args in calls:
                metric.update(*(arg.flatten(0, 1).clone() for arg in args))
            return
        singly = (
            # clones, because metrics cannot keep tensors that were made in inference mode
            (int(client), int(step), number, [arg[k].clone() for arg in args])
            for noted, number, args in calls
            for k, (client, step) in enumerate(zip(noted.clients, noted.steps, strict=True))
        )
        for _, _, _, args in sorted(singly, key=lambda call: call[:3]):
            metric.update(*args)


def _values(noted: _Noted, name: str) -> Tensor:
    """The values that K steps logged under ``name``, in float64 on the CPU."""
    entries = noted.outline.logged
    if (known := entries[name].known) is not None:
        return torch.full((len(noted.clients),), float(known), dtype=torch.float64)
    return noted.values[[key for key in entries if entries[key].known is None].index(name)].double().cpu()


def _batch_size(noted: _Noted, name: str) -> int:
    given = noted.outline.logged[name].batch_size
    return noted.size if given is None else given


def _arguments(noted: _Noted, metric: Metric) -> Iterable[list[Tensor]]:
    """The arguments (K, ...) of each update of a metric."""
    at = sum(entry.known is None for entry in noted.outline.logged.values())
    for updated, count in noted.outline.updates:
        if updated is metric:
            yield noted.values[at : at + count]
        at += count
