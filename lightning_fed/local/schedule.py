"""Choose the batches of a visit: the loader, the number of its batches, their order."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch

from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import seed_global, torch_generator
from lightning_fed.data.batches import cut_visit, limited, limited_visit, orders_of
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.lightning import is_overridden, pl
from lightning_fed.local.sampled import sampled_batches
from lightning_fed.trainer.hooks import Visit


def visit_loaders(
    trainer: pl.Trainer, work: LocalWork, visit: Visit, *, seed: bool = True
) -> Iterator[tuple[Any, int]]:
    """Yield the loader of each local epoch of a visit, and the number of its batches; sets ``visit.planned``.

    ``seed`` also seeds the global random generators for each epoch, for modules and data that draw from them.
    """
    data: Any = trainer.datamodule
    overridden = is_overridden("client_dataloader", data, FederatedDataModule)
    for epoch, loader_and_count in enumerate((_own_loaders if overridden else _loaders)(trainer, work, visit)):
        if seed:
            seed_global(work.seed, visit.round, visit.client, epoch)
        yield loader_and_count


def planned_steps(trainer: pl.Trainer, work: LocalWork, cid: ClientId) -> int:
    """Number of batches of a visit of this client."""
    visit = Visit(0, cid, 0, 1)
    next(visit_loaders(trainer, work, visit, seed=False))
    return visit.planned


def planned_batches(trainer: pl.Trainer, work: LocalWork) -> dict[ClientId, int]:
    """Number of batches of a visit, for every client of the federation."""
    data: Any = trainer.datamodule
    if work.steps:
        return dict.fromkeys(data.client_ids, planned_steps(trainer, work, data.client_ids[0]))
    if data.sampler is not None or is_overridden("client_dataloader", data, FederatedDataModule):
        return {cid: planned_steps(trainer, work, cid) for cid in data.client_ids}
    sizes = {cid: data.num_examples(cid) for cid in data.client_ids}
    cuts = {n: cut_visit(trainer, work, n, data.batch_size, data.drop_last, 1.0).steps for n in set(sizes.values())}
    return {cid: cuts[n] for cid, n in sizes.items()}


def _loaders(trainer: pl.Trainer, work: LocalWork, visit: Visit) -> Iterator[tuple[Any, int]]:
    """Yield loaders of batches that are cut here, so that every engine has the same batches."""
    data: Any = trainer.datamodule
    own_order = data.sampler is not None and not trainer.overfit_batches  # overfit_batches keeps the stored order
    epochs = (sampled_batches if own_order else _shuffled_batches)(trainer, work, visit)
    visit.planned = sum(map(len, epochs))
    for epoch, batches in enumerate(epochs):
        yield data.batches_dataloader(visit.client, batches, _generator(work, visit, epoch)), len(batches)


def _shuffled_batches(trainer: pl.Trainer, work: LocalWork, visit: Visit) -> list[list[torch.Tensor]]:
    """The batches of each local epoch of a visit, as docs/draws.md specifies them."""
    data: Any = trainer.datamodule
    samples, cid = data.num_examples(visit.client), visit.client
    cut = cut_visit(trainer, work, samples, data.batch_size, data.drop_last, visit.work)
    (order,) = orders_of(trainer, work.seed, visit.round, [cid], [samples], [cut])
    rows, sizes = torch.from_numpy(cut.rows(order)), cut.sizes().tolist()
    batches = [own[:size] for own, size in zip(rows, sizes, strict=True)]
    return [batches[first:last] for first, last in pairwise([*cut.first_steps(), cut.steps])]


def _own_loaders(trainer: pl.Trainer, work: LocalWork, visit: Visit) -> Iterator[tuple[Any, int]]:
    """Yield the user's own loader, newly made for every epoch."""
    data: Any = trainer.datamodule
    epoch = done = 0
    while epoch == 0 or done < visit.planned:
        generator = _generator(work, visit, epoch)
        loader = data.client_dataloader(visit.client, generator, shuffle=not trainer.overfit_batches)
        if len(loader) < 1:
            raise ValueError("client_dataloader gave no batches. Give the client samples, or set drop_last=False.")
        length = limited(trainer.limit_train_batches, len(loader)) if trainer.overfit_batches else len(loader)
        if epoch == 0:
            steps, epochs = work.steps or 0, work.epochs or 1
            due = max(1, int(visit.work * steps)) if steps else max(1, int(visit.work * epochs)) * length
            visit.planned = limited_visit(trainer, due)
        count = min(length, visit.planned - done)
        yield loader, count
        done += count
        epoch += 1


def _generator(work: LocalWork, visit: Visit, epoch: int) -> torch.Generator:
    """A generator for each local epoch, so that a draw never depends on earlier draws."""
    return torch_generator(work.seed, visit.round, visit.client, epoch, "batches")
