"""Metrics of clients from what a step gives for every sample by itself: means, and torchmetrics that are sums."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed.evaluation.logged import number_of
from lightning_fed.evaluation.results import Evaluation, stated_directions
from lightning_fed.local.stacked.log import is_additive
from lightning_fed.local.stacked.pure_step import Entry, Notes, UnfitError


@dataclass
class Figures:
    """The columns that a step gives for a sample: numbers by name, then the arguments of each update of a metric.

    The loss that the step returns is a number without a name. ``metrics`` are those that are logged, by name, in
    order with the numbers (None); ``stated`` is what torchmetrics says of their better sides.
    """

    numbers: list[str | None] = field(default_factory=list)
    updates: list[tuple[Metric, int]] = field(default_factory=list)
    metrics: dict[str, Metric | None] = field(default_factory=dict)
    stated: dict[str, bool] = field(default_factory=dict)

    def evaluations(self, columns: Sequence[Tensor], sizes: list[int]) -> Iterator[Evaluation]:
        """Evaluations of clients that own so many of the rows of each column, one client after another."""
        columns_of_numbers = zip(self.numbers, columns, strict=False)
        values = {name: _means(column, sizes) for name, column in columns_of_numbers}
        for name, metric in self.metrics.items():
            if metric is not None:
                values[name] = self._by_client(metric, columns, sizes)
        for i, size in enumerate(sizes):
            returned = values[None][i] if None in values else None
            yield Evaluation.of(returned, {name: values[name][i] for name in self.metrics}, size, self.stated)

    def _by_client(self, metric: Metric, columns: Sequence[Tensor], sizes: list[int]) -> list[float]:
        """A metric of every client: updated with all its samples at once, because it is a sum over samples."""
        at, rows, meter = len(self.numbers), [], metric.clone()
        for updated, count in self.updates:
            if updated is metric:
                rows.append([torch.split(column, sizes) for column in columns[at : at + count]])
            at += count
        values = []
        for i in range(len(sizes)):
            meter.reset()
            for arguments in rows:
                meter.update(*(parts[i].flatten(0, 1) for parts in arguments))
            if (value := number_of(meter.compute())) is None:
                raise UnfitError(f"{type(metric).__name__} is not a single number")
            values.append(value)
        return values


def _means(values: Tensor, sizes: list[int]) -> list[float]:
    owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, owners, values.double().cpu())
    return (sums / torch.tensor(sizes)).tolist()


def figures_of(loss: Tensor | None, notes: Notes) -> tuple[Figures, tuple[Tensor, ...]]:
    """The figures of a step on a single sample, and its columns.

    Raises :class:`UnfitError` for what is neither declared to be a mean over samples, nor known to be a sum over them.
    """
    numbers: dict[str | None, Any] = {} if loss is None else {None: loss}
    metrics: dict[str, Metric | None] = {}
    updates: list[tuple[Metric, tuple[Tensor, ...]]] = []
    for name, (value, entry) in notes.logged.items():
        own = [args for metric, args in notes.updates if metric is value]
        if isinstance(value, Metric) and not _is_share_of_correct(value, own):
            _check_additive(value, own)
            if all(metric is not value for metric in metrics.values()):
                updates += [(value, args) for args in own]
            metrics[name] = value
        else:
            _check_mean(name, value, entry)
            metrics[name], numbers[name] = None, _correct(*own[0]) if isinstance(value, Metric) else value
    columns = [torch.as_tensor(value).reshape(()) for value in numbers.values()]
    stated = stated_directions({name: value for name, (value, _) in notes.logged.items()})
    figures = Figures(list(numbers), [(metric, len(args)) for metric, args in updates], metrics, stated)
    return figures, (*columns, *(arg for _, args in updates for arg in args))


def _check_mean(name: str, value: Any, entry: Entry) -> None:
    """Refuse numbers that ``loss_is_mean`` does not declare to be means over samples, each sample counted once."""
    if isinstance(value, Metric):
        return
    if not any(word in name.lower() for word in ("loss", "acc")):
        raise UnfitError(f"{name!r} is logged as a number, which need not be a mean over samples")
    if entry.reduction != "mean" or entry.batch_size not in (None, 1):
        raise UnfitError(f"{name!r} is logged with reduce_fx or batch_size of its own, not as a mean over samples")


def _check_additive(metric: Metric, updates: list[tuple[Tensor, ...]]) -> None:
    if not is_additive(metric):
        raise UnfitError(f"{type(metric).__name__} is not a sum over samples")
    if not updates or any(arg.ndim == 0 for args in updates for arg in args):
        raise UnfitError(f"{type(metric).__name__} is not updated with rows of samples")


def _is_share_of_correct(metric: Metric, updates: list[tuple[Tensor, ...]]) -> bool:
    """Whether a metric is the share of correct samples, which takes no update for every client."""
    plain = type(metric) is MulticlassAccuracy and metric.average == "micro" and metric.top_k == 1
    return plain and metric.ignore_index is None and len(updates) == 1 and updates[0][0].ndim == 2


def _correct(scores: Tensor, target: Tensor) -> Tensor:
    return (scores.argmax(1) == target).to(torch.get_default_dtype())
