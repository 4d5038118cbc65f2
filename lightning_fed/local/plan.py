"""The minibatches of many clients' visits, drawn at once, as rows of tensors."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Hashable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed._compat import is_overridden
from lightning_fed.data import FederatedDataModule
from lightning_fed.local.functional import UnfitError
from lightning_fed.randomness import derive_seeds
from lightning_fed.tensors import TensorLoader
from lightning_fed.visit import Visit, epoch_length, local_epochs, planned_batches

if TYPE_CHECKING:
    from lightning_fed.server import FederatedServer

#: Batches of a stack are gathered for as many steps at once as fit into this.
BLOCK_BYTES = 8 * 2**20


#: Clients by number, with their loaders, and the orders of all their epochs.
_Group = tuple[list[tuple[int, TensorLoader]], list[Tensor]]


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of one visit, the same that a loader would give: ``rows`` (S, B), of which ``sizes`` (S,) count."""

    loader: TensorLoader
    rows: Tensor
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, trainer: pl.Trainer, server: FederatedServer, visit: Visit) -> Plan:
        return cls.all_of(trainer, server, [visit])[0]

    @classmethod
    def all_of(cls, trainer: pl.Trainer, server: FederatedServer, visits: Sequence[Visit]) -> list[Plan]:
        """The plans of several visits, which become planned; what they have in common is worked out once."""
        run: Any = trainer
        data = run.datamodule
        if is_overridden("client_dataloader", data, FederatedDataModule):
            return [cls._by_epoch(trainer, server, visit) for visit in visits]
        seed, generator, shuffle = server.seed, torch.Generator(), not run.overfit_batches
        alike: dict[tuple[int, ...], _Group] = {}
        for i, visit in enumerate(visits):
            loader = _in_memory(data.client_dataloader(visit.client, generator, shuffle=shuffle), visit)
            length = epoch_length(trainer, len(loader))
            visit.planned = planned_batches(trainer, server, length, visit.work)
            epochs = -(-visit.planned // length)
            orders = loader.orders(derive_seeds(seed, visit.round, visit.client, count=epochs, last="batches"))
            group = alike.setdefault((len(orders[0]), length, visit.planned, loader.batch_size), ([], []))
            group[0].append((i, loader))
            group[1].extend(orders)
        plans: dict[int, Plan] = {}
        for (_, length, planned, size), (members, orders) in alike.items():
            rows, sizes = _batched(torch.stack(orders), length, size)
            of_each = rows.view(len(members), -1, size)[:, :planned].unbind()
            plans |= {i: cls(loader, own, sizes[:planned]) for (i, loader), own in zip(members, of_each, strict=True)}
        return [plans[i] for i in range(len(visits))]

    @classmethod
    def _by_epoch(cls, trainer: pl.Trainer, server: FederatedServer, visit: Visit) -> Plan:
        """With a loader of its own for every epoch."""
        epochs = []
        for epoch, count in local_epochs(trainer, server, visit, seed=False):
            loader = _in_memory(epoch, visit)
            epochs.append(_batched(loader.order().unsqueeze(0), count, loader.batch_size))
        rows, sizes = zip(*epochs, strict=True)
        return cls(loader, torch.cat(rows), np.concatenate(sizes))

    @property
    def steps(self) -> int:
        return len(self.sizes)


def _in_memory(loader: object, visit: Visit) -> TensorLoader:
    if type(loader) is not TensorLoader:
        raise UnfitError(f"the data of client {visit.client!r} are not tensors in memory")
    return loader


def _batched(orders: Tensor, length: int, size: int) -> tuple[Tensor, NDArray[np.int64]]:
    """Rows and sizes of the first ``length`` batches of every epoch's order; missing samples repeat the first one."""
    epochs, samples = orders.shape
    sizes, missing = np.full((epochs, length), size), length * size - samples
    if missing > 0:
        orders = torch.cat([orders, orders[:, :1].expand(-1, missing)], dim=1)
        sizes[:, -1] -= missing
    return orders[:, : length * size].reshape(-1, size), sizes.reshape(-1)


def _lengthened(rows: Tensor, steps: int) -> Tensor:
    """With its last batch again and again."""
    return rows if len(rows) == steps else torch.cat([rows, rows[-1:].expand(steps - len(rows), -1)])


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
    """Which samples the clients of a stack look at: ``rows`` (m, S, B) of the tensors in ``sources``.

    There is one source for each client, or one for all.
    """

    sources: Sequence[Sequence[Tensor]]
    rows: Tensor

    @classmethod
    def of(cls, sources: Sequence[Sequence[Tensor]], rows: Tensor) -> Samples:
        """One source for all, if that takes no more memory than the samples themselves."""
        kinds = {tuple((t.shape[1:], t.dtype) for t in tensors) for tensors in sources}
        if len(kinds) > 1:
            raise UnfitError("samples of different clients have different shapes or types")
        keys = [tuple(map(id, tensors)) for tensors in sources]  # of all: clients may share inputs and not labels
        distinct = dict(zip(keys, sources, strict=True))
        if len(distinct) == 1:
            return cls(sources[:1], rows)
        lengths = [tensors[0].shape[0] for tensors in distinct.values()]
        if sum(lengths) > rows.numel():
            return cls(sources, rows)
        begin = dict(zip(distinct, itertools.accumulate(lengths, initial=0), strict=False))
        offsets = torch.tensor([begin[key] for key in keys])
        parts = list(zip(*distinct.values(), strict=True))
        rooms = [_scratch.get("pool", k, sum(lengths), part[0]) for k, part in enumerate(parts)]
        pool = [torch.cat(part, out=room) for part, room in zip(parts, rooms, strict=True)]
        return cls([pool], rows + offsets.view(-1, 1, 1))

    def take(self, steps: slice) -> list[Tensor]:
        """Those of some steps, one client after another; until others are taken."""
        rows = self.rows[:, steps].flatten(1).contiguous()
        taken = [_scratch.get("batches", k, rows.numel(), t) for k, t in enumerate(self.sources[0])]
        if len(self.sources) == 1:
            for tensor, out in zip(self.sources[0], taken, strict=True):
                torch.index_select(tensor, 0, rows.view(-1), out=out)
            return taken
        for k, out in enumerate(taken):
            for tensors, own, part in zip(self.sources, rows, out.chunk(len(rows)), strict=True):
                torch.index_select(tensors[k], 0, own, out=part)
        return taken


@dataclass(frozen=True, eq=False)
class Block:
    """Some steps of a stack: tensors (m, T, B, ...), weights of samples (T, m, B), batch sizes (T, m).

    All blocks of a stack have the same shape; the last may have fewer ``steps`` than T. The next one takes its place in
    memory.
    """

    tensors: list[Tensor]
    weights: Tensor
    sizes: Tensor
    steps: int

    def batch(self, t: int) -> list[Tensor]:
        return [tensor[:, t] for tensor in self.tensors]


class Blocks:
    """The steps of all visits side by side, in blocks that are gathered when their turn comes.

    A visit that has ended goes on with samples that count for nothing, and so do the visits that fill the stack up to
    ``m``.

    Args:
        convert: makes batches what the module takes.
        like: has the precision and the device of the weights.
    """

    def __init__(self, plans: Sequence[Plan], m: int, convert: Callable[[Any], Any], like: Tensor) -> None:
        self.m, self.convert, self.like = m, convert, like
        first = plans[0].loader
        if any(p.loader.transform != first.transform or p.loader.batch_size != first.batch_size for p in plans):
            raise UnfitError("clients have different transforms or batch sizes")
        self.transform, self.batch_size = first.transform, first.batch_size
        self.steps = max(plan.steps for plan in plans)
        bytes_by_step = sum(t[:1].numel() * t.element_size() for t in first.tensors) * m * first.batch_size
        most = max(1, BLOCK_BYTES // max(1, bytes_by_step))
        self.length = -(-self.steps // -(-self.steps // most))  # blocks as even as they can be
        whole = -(-self.steps // self.length) * self.length
        self.sizes = np.zeros((whole, m), dtype=np.int64)
        for i, plan in enumerate(plans):
            self.sizes[: plan.steps, i] = plan.sizes
        everybody = [*plans, *[plans[0]] * (m - len(plans))]
        rows = torch.stack([_lengthened(plan.rows, whole) for plan in everybody])
        self.samples = Samples.of([plan.loader.tensors for plan in everybody], rows)

    def __iter__(self) -> Iterator[Block]:
        return (self._block(first) for first in range(0, self.steps, self.length))

    def _block(self, first: int) -> Block:
        steps = min(self.length, self.steps - first)
        taken = self.samples.take(slice(first, first + self.length))
        batch = self.convert(taken if self.transform is None else self.transform(taken))
        shape = (self.m, self.length, self.batch_size)
        tensors = [part.to(self.like.device).view(*shape, *part.shape[1:]) for part in batch]
        counts = torch.from_numpy(self.sizes[first : first + steps]).to(self.like.device)
        inside = torch.arange(self.batch_size, device=self.like.device) < counts.unsqueeze(-1)
        weights = inside.to(self.like.dtype) / counts.clamp(min=1).to(self.like.dtype).unsqueeze(-1)
        return Block(tensors, weights, counts, steps)
