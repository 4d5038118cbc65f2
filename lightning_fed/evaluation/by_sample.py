"""Evaluate many clients at once: every sample by itself, in batches that mix clients."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.func import vmap
from torch.nn.utils.rnn import pad_sequence

from lightning_fed.core.layout import Layout
from lightning_fed.core.memory import ClientId
from lightning_fed.data.tensor_loader import TensorLoader
from lightning_fed.evaluation.figures import Figures, figures_of
from lightning_fed.evaluation.results import Evaluation
from lightning_fed.lightning import is_overridden, pl
from lightning_fed.local.stacked.pure_step import PureStep, UnfitError
from lightning_fed.local.stacked.stack import STACK
from lightning_fed.trainer.batches import move_batch
from lightning_fed.trainer.eligibility import TRANSFER_HOOKS
from lightning_fed.trainer.ranks import Ranks, ranks_of

#: Minimum number of clients for evaluating them together.
MANY = 16
#: Bytes of a batch, unless ``eval_batch_size`` samples take more.
BATCH_BYTES = 2**20


@dataclass(frozen=True, eq=False)
class Models:
    """Clients' own models in a layout; ``recall`` gives that of one client, if it has one."""

    layout: Layout
    recall: Callable[[ClientId], Tensor | None]

    def stack(self, ids: Sequence[ClientId]) -> dict[str, Tensor]:
        models = [x_i for cid in ids if (x_i := self.recall(cid)) is not None]
        if len(models) < len(ids):
            raise UnfitError("some clients have no model of their own")
        return vmap(self.layout.split)(torch.stack(models))


def evaluate_together(
    trainer: pl.Trainer, step: str, split: str, ids: Sequence[ClientId], models: Models | None = None
) -> dict[ClientId, Evaluation]:
    """The model the module holds, or clients' own ``models``, on every client's data.

    Raises an error if clients have to be evaluated one by one. The module is in evaluation mode and is not changed.
    """
    for owner in (trainer.lightning_module, trainer.datamodule):  # type: ignore[attr-defined]
        for name in TRANSFER_HOOKS:
            if is_overridden(name, owner):
                raise UnfitError(f"{type(owner).__name__} overrides {name}")
    by_sample, ranks = _BySample(trainer, step), ranks_of(trainer)

    def share() -> dict[ClientId, Evaluation]:
        found: dict[ClientId, Evaluation] = {}
        for clients, sizes, batch, limit in _batches(trainer, split, ids, models is not None, ranks):
            if models is None:
                columns = by_sample(batch, limit)
            else:
                columns = by_sample.each_by_its_own(models.stack(clients), sizes, batch)
            found |= zip(clients, by_sample.figures.evaluations(columns, sizes), strict=True)
        return found

    return ranks.merged(share, ids)


def _batches(
    trainer: pl.Trainer, split: str, ids: Sequence[ClientId], alike: bool, ranks: Ranks
) -> Iterator[tuple[list[ClientId], list[int], list[Tensor], int]]:
    """Yield clients, their numbers of samples, all their samples, and how many samples fit in a batch.

    ``alike`` groups clients of about the same size.
    """
    data: Any = trainer.datamodule  # type: ignore[attr-defined]
    if data.collate_fn is not None:
        raise UnfitError("the data have a collate_fn of their own")
    loaders = {cid: data.client_eval_dataloader(cid, split) for cid in ids}
    first = next(iter(loaders.values()))
    for cid, loader in loaders.items():
        if type(loader) is not TensorLoader or loader.transform != first.transform:
            raise UnfitError(f"the {split} data of client {cid!r} are not like the others'")
    sizes = {cid: loader.samples for cid, loader in loaders.items()}
    limit = max(data.eval_batch_size, BATCH_BYTES // sum(t[:1].numel() * t.element_size() for t in first.tensors))
    ordered = sorted(ids, key=sizes.__getitem__) if alike else ids
    for clients in ranks.share(list(_groups(ordered, sizes, limit, alike))):  # the same groups for any number of ranks
        tensors = [torch.cat(parts) for parts in zip(*(loaders[cid].all_rows() for cid in clients), strict=True)]
        batch = move_batch(trainer, tensors if first.transform is None else first.transform(tensors))
        yield clients, [sizes[cid] for cid in clients], list(batch), limit


def _groups(
    ids: Sequence[ClientId], sizes: Mapping[ClientId, int], limit: int, alike: bool
) -> Iterator[list[ClientId]]:
    """Yield clients whose samples fill a batch, or one larger client; ``alike`` counts each as the largest."""
    group: list[ClientId] = []
    samples = 0
    for cid in ids:
        samples = (len(group) + 1) * sizes[cid] if alike else samples + sizes[cid]
        if group and (samples > limit or len(group) == STACK):
            yield group
            group, samples = [], sizes[cid]
        group.append(cid)
    if group:
        yield group


class _BySample:
    """What a step returns, logs and gives to metrics for every sample, in a batch of that sample alone."""

    def __init__(self, trainer: pl.Trainer, step: str) -> None:
        self._step = PureStep(trainer.lightning_module, step)
        self.figures = Figures()

    def __call__(self, batch: list[Tensor], limit: int) -> list[Tensor]:
        """Evaluate the model that the module holds, ``limit`` samples at a time."""
        pieces = zip(*(torch.split(part, limit) for part in batch), strict=True)
        with torch.no_grad():
            found = [vmap(partial(self._one, {}))(*piece) for piece in pieces]
        return [torch.cat(column) for column in zip(*found, strict=True)]

    def each_by_its_own(self, models: dict[str, Tensor], sizes: list[int], batch: list[Tensor]) -> list[Tensor]:
        """Evaluate each sample with its client's own model."""
        padded = [pad_sequence(list(torch.split(part, sizes)), batch_first=True) for part in batch]
        inside = torch.arange(max(sizes)) < torch.tensor(sizes).unsqueeze(1)

        def client(model: dict[str, Tensor], *rows: Tensor) -> tuple[Tensor, ...]:
            columns: tuple[Tensor, ...] = vmap(partial(self._one, model))(*rows)
            return columns

        with torch.no_grad():
            found = vmap(client)(models, *padded)
        return [column[inside] for column in found]

    def _one(self, model: dict[str, Tensor], *sample: Tensor) -> tuple[Tensor, ...]:
        """The columns of one sample."""
        loss, notes = self._step.run(model, [part.unsqueeze(0) for part in sample])
        self.figures, columns = figures_of(loss, notes)
        return columns
