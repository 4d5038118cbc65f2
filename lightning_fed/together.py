"""Evaluating many clients at once: every sample by itself, in batches that do not care whose it is."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor
from torch.func import vmap
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed._compat import is_overridden
from lightning_fed.evaluations import Evaluation
from lightning_fed.lean import TRANSFER_HOOKS
from lightning_fed.local.functional import Notes, Step, UnfitError
from lightning_fed.store import ClientId
from lightning_fed.tensors import TensorLoader
from lightning_fed.visit import move_batch

#: From so many clients on it pays.
MANY = 16


def evaluate_together(
    trainer: pl.Trainer, step: str, split: str, ids: Sequence[ClientId]
) -> dict[ClientId, Evaluation]:
    """The model the module holds on every client's data; raises where clients have to be evaluated one by one.

    The module is in evaluation mode and is not changed.
    """
    for owner in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        for name in TRANSFER_HOOKS:
            if is_overridden(name, owner):
                raise UnfitError(f"{type(owner).__name__} overrides {name}")
    by_sample = _BySample(trainer, step)
    found: dict[ClientId, Evaluation] = {}
    for clients, sizes, batch in _batches(trainer, split, ids):
        losses, accuracies = by_sample(batch)
        owners = torch.repeat_interleave(torch.arange(len(sizes)), torch.tensor(sizes))
        means = [_means(values, owners, sizes) for values in (losses, accuracies)]
        found |= {cid: Evaluation(means[0][i], means[1][i], sizes[i]) for i, cid in enumerate(clients)}
    return found


def _means(values: Tensor | None, owners: Tensor, sizes: list[int]) -> list[float]:
    if values is None:
        return [math.nan] * len(sizes)
    sums = torch.zeros(len(sizes), dtype=torch.float64).index_add_(0, owners, values.double().cpu())
    return (sums / torch.tensor(sizes)).tolist()


def _batches(
    trainer: pl.Trainer, split: str, ids: Sequence[ClientId]
) -> Iterator[tuple[list[ClientId], list[int], list[Tensor]]]:
    """All samples of some clients at a time: who they are, how many each has, and the samples."""
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    waiting: list[tuple[ClientId, TensorLoader]] = []
    for k, cid in enumerate(ids):
        loader = data.client_eval_dataloader(cid, split)
        if type(loader) is not TensorLoader or (waiting and loader.transform != waiting[0][1].transform):
            raise UnfitError(f"the {split} data of client {cid!r} are not like the others'")
        waiting.append((cid, loader))
        if k == len(ids) - 1 or sum(each.samples for _, each in waiting) >= data.eval_batch_size:
            parts = zip(*(each.all_rows() for _, each in waiting), strict=True)
            tensors = [torch.cat(part) for part in parts]
            transform = waiting[0][1].transform
            batch = move_batch(trainer, tensors if transform is None else transform(tensors))
            yield [cid for cid, _ in waiting], [each.samples for _, each in waiting], list(batch)
            waiting = []


class _BySample:
    """Loss and accuracy of every sample: as a step returns or logs them for a batch of that sample alone."""

    def __init__(self, trainer: pl.Trainer, step: str) -> None:
        self.module = trainer.lightning_module
        self.limit = trainer.datamodule.eval_batch_size  # type: ignore[attr-defined]
        self._step = Step(self.module, step)
        self._no_loss = self._no_accuracy = False

    def __call__(self, batch: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
        pieces = zip(*(torch.split(part, self.limit) for part in batch), strict=True)
        with torch.no_grad():
            found = [vmap(self._one)(*piece) for piece in pieces]
        losses, values = (
            torch.cat(column) for column in zip(*((f["loss"], f["accuracy"]) for f in found), strict=True)
        )
        return (None if self._no_loss else losses), (None if self._no_accuracy else values)

    def _one(self, *sample: Tensor) -> dict[str, Tensor]:
        notes = Notes()
        with notes.taken(self.module):
            output = self._step([part.unsqueeze(0) for part in sample])
        loss = output.get("loss") if isinstance(output, dict) else output
        if not isinstance(loss, Tensor):
            loss = _logged(notes, "loss")
        accuracy = _logged(notes, "acc")
        if isinstance(accuracy, Metric):
            accuracy = _correct(accuracy, notes)
        if isinstance(loss, Metric):
            raise UnfitError("the loss is a metric")
        self._no_loss, self._no_accuracy = loss is None, accuracy is None
        nothing = torch.zeros(())
        return {
            "loss": nothing if loss is None else torch.as_tensor(loss).reshape(()),
            "accuracy": nothing if accuracy is None else torch.as_tensor(accuracy).reshape(()),
        }


def _logged(notes: Notes, what: str) -> Any:
    """The first value that is logged with this in its name."""
    return next((value for name, (value, _) in notes.logged.items() if what in name.lower()), None)


def _correct(metric: Metric, notes: Notes) -> Tensor:
    """Whether the one sample is right, where the metric is the share of samples that are."""
    plain = type(metric) is MulticlassAccuracy and metric.average == "micro" and metric.top_k == 1
    updates = [args for updated, args in notes.updates if updated is metric]
    if not plain or metric.ignore_index is not None or len(updates) != 1 or updates[0][0].ndim != 2:
        raise UnfitError(f"{type(metric).__name__} is not a mean over samples")
    scores, target = updates[0]
    return (scores.argmax(1) == target).to(torch.get_default_dtype())
