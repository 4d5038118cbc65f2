"""The minibatches of many clients' visits, drawn at once, as rows of tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.randomness import seed_global
from lightning_fed.data.batches import cut_visit, orders_of
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.tensor_loader import Memory, TensorLoader, Transform, in_memory, is_row_by_row
from lightning_fed.lightning import is_overridden, pl
from lightning_fed.local.schedule import visit_loaders
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.trainer.hooks import Visit

#: Batches of a stack are gathered for as many steps at once as fit into this.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of one visit, the same that a loader would give: ``rows`` (S, B), of which ``sizes`` (S,) count.

    ``epochs`` are the steps with which local epochs begin, each with the key from which its draws are seeded.
    ``samples`` are the shapes and types of a sample as it is stored.
    """

    tensors: Sequence[Tensor]
    transform: Transform | None
    rows: Tensor
    sizes: NDArray[np.int64]
    epochs: Sequence[tuple[int, tuple[int | str, ...]]] = ()
    samples: Hashable = ()

    @classmethod
    def all_of(cls, trainer: pl.Trainer, work: LocalWork, visits: Sequence[Visit]) -> list[Plan]:
        """Plan several visits at once; sets ``visit.planned``."""
        data: Any = trainer.datamodule
        check_plannable(data)
        if is_overridden("client_dataloader", data, FederatedDataModule):
            return [cls._by_epoch(trainer, work, visit) for visit in visits]
        stored = [_in_memory(in_memory(data.client_dataset(visit.client)), visit) for visit in visits]
        samples = [len(tensors[0] if rows is None else rows) for tensors, rows, _ in stored]
        size, drop, kinds = data.batch_size, data.drop_last, list(zip(samples, (v.work for v in visits), strict=True))
        by_kind = {kind: cut_visit(trainer, work, kind[0], size, drop, kind[1]) for kind in set(kinds)}
        cuts = [by_kind[kind] for kind in kinds]
        ids, round, seed = [visit.client for visit in visits], visits[0].round, work.seed
        orders = orders_of(trainer, seed, round, ids, samples, cuts)
        plans = []
        for visit, (tensors, own, transform), cut, order in zip(visits, stored, cuts, orders, strict=True):
            visit.planned = cut.steps
            rows = torch.from_numpy(cut.rows(order))
            epochs = () if is_row_by_row(transform) else cut.first_steps()
            keys = [(first, (seed, round, visit.client, epoch)) for epoch, first in enumerate(epochs)]
            chosen = rows if own is None else own[rows]
            plans.append(cls(tensors, transform, chosen, cut.sizes(), keys, kind_of(tensors)))
        return plans

    @classmethod
    def _by_epoch(cls, trainer: pl.Trainer, work: LocalWork, visit: Visit) -> Plan:
        """With a loader of the user's own for every epoch."""
        batches: list[Tensor] = []
        epochs = []
        for epoch, (loader, count) in enumerate(visit_loaders(trainer, work, visit, seed=False)):
            if type(loader) is not TensorLoader:
                raise UnfitError(f"the data of client {visit.client!r} are not tensors in memory")
            if loader.shuffle and loader.generator is None:
                raise UnfitError("client_dataloader shuffles without its generator")
            epochs.append((len(batches), (work.seed, visit.round, visit.client, epoch)))
            batches += loader.rows_by_batch()[:count]
        sizes = np.array([len(batch) for batch in batches])
        rows = torch.stack([_filled_up(batch, int(sizes.max())) for batch in batches])
        return cls(loader.tensors, loader.transform, rows, sizes, epochs, kind_of(loader.tensors))

    @property
    def steps(self) -> int:
        return len(self.sizes)

    @property
    def batch_size(self) -> int:
        """The size of a batch that is not short."""
        return self.rows.shape[1]

    @property
    def shape(self) -> Hashable:
        """What batches that are computed together have in common."""
        return self.batch_size, kind_of(self.tensors), self.samples

    def widened(self, size: int) -> Plan:
        """The same batches, filled up to another size."""
        return self if size == self.batch_size else replace(self, rows=_filled_up(self.rows.t(), size).t().contiguous())

    def transformed(self) -> Plan:
        """The same batches after the transform, which has seen one after another, as in a loader."""
        if is_row_by_row(self.transform) or self.transform is None:
            return self
        keys, made = dict(self.epochs), []
        for step, (rows, size) in enumerate(zip(self.rows, self.sizes.tolist(), strict=True)):
            if step in keys:
                seed_global(*keys[step])
            batch = self.transform([tensor[rows[:size]] for tensor in self.tensors])
            if any(len(part) != size for part in batch):
                raise UnfitError("the transform of the data changes the number of samples of a batch")
            made.append([_filled_up(part, self.batch_size) for part in batch])
        tensors = [torch.cat(parts) for parts in zip(*made, strict=True)]
        rows = torch.arange(self.rows.numel()).view(self.rows.shape)
        return Plan(tensors, None, rows, self.sizes, (), self.samples)


def check_plannable(data: FederatedDataModule) -> None:
    """Refuse batches that are not rows of tensors in the order of docs/draws.md."""
    for name in ("collate_fn", "sampler"):
        if getattr(data, name) is not None:
            raise UnfitError(f"the data have a {name} of their own")


def kind_of(tensors: Sequence[Tensor]) -> Hashable:
    """The shapes and types of a sample."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


def _in_memory(memory: Memory | None, visit: Visit) -> Memory:
    if memory is None:
        raise UnfitError(f"the data of client {visit.client!r} are not tensors in memory")
    return memory


def _filled_up(rows: Tensor, size: int) -> Tensor:
    """With its first row again and again."""
    return rows if len(rows) == size else torch.cat([rows, rows[:1].expand(size - len(rows), *rows.shape[1:])])


class _Scratch(threading.local):
    """Memory for batches, kept from stack to stack: fresh memory takes longer to come by than to fill."""

    def __init__(self) -> None:
        self._kept: dict[Hashable, Tensor] = {}

    def get(self, use: str, number: int, rows: int, like: Tensor) -> Tensor:
        """Room for so many rows like those of a tensor, until somebody has the same use for it."""
        size = rows * like[:1].numel()
        room = self._kept.get((use, number, like.dtype, like.device))
        if room is None or len(room) < size:
            with torch.inference_mode(False):  # what is made in inference mode can be written only there
                room = torch.empty(size, dtype=like.dtype, device=like.device)
            if size * like.element_size() <= BLOCK_BYTES:
                self._kept[use, number, like.dtype, like.device] = room
        return room[:size].view(rows, *like.shape[1:])


_scratch = _Scratch()


@dataclass(frozen=True, eq=False)
class Samples:
    """The samples that the clients of a stack look at: ``rows`` (S_i, B) of the tensors in ``sources``.

    There is one source for each client, or one for all.
    """

    sources: Sequence[Sequence[Tensor]]
    rows: Sequence[Tensor] | Tensor

    @classmethod
    def of(cls, sources: Sequence[Sequence[Tensor]], rows: Sequence[Tensor] | Tensor) -> Samples:
        """One source for all, if that takes no more memory than the samples themselves."""
        if len({own.shape for own in rows}) == 1:
            rows = torch.stack(list(rows))
        kinds = set(map(kind_of, sources))
        if len(kinds) > 1:
            raise UnfitError("samples of different clients have different shapes or types")
        keys = [tuple(map(id, tensors)) for tensors in sources]  # of all: clients may share inputs and not labels
        distinct = dict(zip(keys, sources, strict=True))
        if len(distinct) == 1:
            return cls(sources[:1], rows)
        lengths = [tensors[0].shape[0] for tensors in distinct.values()]
        if sum(lengths) > sum(own.numel() for own in rows):
            return cls(sources, rows)
        begin = dict(zip(distinct, itertools.accumulate(lengths, initial=0), strict=False))
        parts = list(zip(*distinct.values(), strict=True))
        rooms = [_scratch.get("pool", k, sum(lengths), part[0]) for k, part in enumerate(parts)]
        pool = [torch.cat(part, out=room) for part, room in zip(parts, rooms, strict=True)]
        offsets = torch.tensor([begin[key] for key in keys])
        if isinstance(rows, Tensor):
            return cls([pool], rows + offsets.view(-1, 1, 1))
        return cls([pool], [own + offset for own, offset in zip(rows, offsets, strict=True)])

    def take(self, steps: Sequence[slice]) -> list[Tensor]:
        """Those of some steps of each client, one client after another; until others are taken."""
        if isinstance(self.rows, Tensor) and all(part == steps[0] for part in steps):
            rows: Sequence[Tensor] = self.rows[:, steps[0]].flatten(1).unbind()
            index = self.rows[:, steps[0]].flatten()
        else:
            rows = [own[part].flatten() for own, part in zip(self.rows, steps, strict=True)]
            index = torch.cat(rows)
        taken = [_scratch.get("batches", k, len(index), t) for k, t in enumerate(self.sources[0])]
        if len(self.sources) == 1:
            for tensor, out in zip(self.sources[0], taken, strict=True):
                torch.index_select(tensor, 0, index, out=out)
            return taken
        for k, out in enumerate(taken):
            parts = torch.split(out, [len(own) for own in rows])
            for tensors, own, part in zip(self.sources, rows, parts, strict=True):
                torch.index_select(tensors[k], 0, own, out=part)
        return taken


class Batches:
    """The batches of all visits of a stack, gathered when their turn comes.

    Args:
        convert: makes batches what the module takes.
        like: has the precision and the device of the weights.
    """

    def __init__(self, plans: Sequence[Plan], convert: Callable[[Any], Any], like: Tensor) -> None:
        first = plans[0]
        if any(plan.transform != first.transform for plan in plans):
            raise UnfitError("clients have different transforms")
        self.convert, self.like, self.transform, self.batch_size = convert, like, first.transform, first.batch_size
        self.sizes = [plan.sizes for plan in plans]
        self.samples = Samples.of([plan.tensors for plan in plans], [plan.rows for plan in plans])
        bytes_by_step = sum(t[:1].numel() * t.element_size() for t in first.tensors) * len(plans) * self.batch_size
        steps = max(plan.steps for plan in plans)
        most = max(1, BLOCK_BYTES // max(1, bytes_by_step))
        self.block = -(-steps // -(-steps // most))  # steps at once: blocks as even as they can be
        self.steps = steps

    def take(self, steps: Sequence[slice]) -> list[Tensor]:
        """Tensors (sum of T_i, B, ...) of some steps of each client; until others are taken."""
        taken = self.samples.take(steps)
        batch = self.convert(taken if self.transform is None else self.transform(taken))
        return [part.to(self.like.device).unflatten(0, (-1, self.batch_size)) for part in batch]
