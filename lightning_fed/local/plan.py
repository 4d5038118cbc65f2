"""The minibatches of many clients' visits, drawn at once, as rows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.local.functional import UnfitError
from lightning_fed.tensors import TensorLoader
from lightning_fed.visit import Visit, local_epochs

if TYPE_CHECKING:
    from lightning_fed.server import FederatedServer

#: Batches of a stack are gathered for as many steps at once as fit into this.
BLOCK_BYTES = 32 * 2**20


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of one visit, the same that a loader would give: ``rows`` (S, B), of which ``sizes`` (S,) count."""

    loader: TensorLoader
    rows: Tensor
    sizes: NDArray[np.int64]

    @classmethod
    def of(cls, trainer: pl.Trainer, server: FederatedServer, visit: Visit) -> Plan:
        rows, sizes = [], []
        for loader, count in local_epochs(trainer, server, visit, seed=False):
            if type(loader) is not TensorLoader:
                raise UnfitError(f"the data of client {visit.client!r} are not tensors in memory")
            order = loader.order()[: count * loader.batch_size]
            missing = count * loader.batch_size - len(order)
            rows.append(torch.cat([order, order[:1].expand(missing)]) if missing else order)
            epoch = np.full(count, loader.batch_size)
            epoch[-1] -= missing
            sizes.append(epoch)
        flat = rows[0] if len(rows) == 1 else torch.cat(rows)
        return cls(loader, flat.view(-1, loader.batch_size), sizes[0] if len(sizes) == 1 else np.concatenate(sizes))

    @property
    def steps(self) -> int:
        return len(self.sizes)


@dataclass(frozen=True, eq=False)
class Block:
    """Some steps of a stack: tensors (m, T, B, ...), weights of samples (T, m, B), batch sizes (T, m).

    All blocks of a stack have the same shape; the last may have fewer ``steps`` than T.
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
        self.plans, self.m, self.convert, self.like = plans, m, convert, like
        first = plans[0].loader
        if any(p.loader.transform != first.transform or p.loader.batch_size != first.batch_size for p in plans):
            raise UnfitError("clients have different transforms or batch sizes")
        if len({tuple((t.shape[1:], t.dtype) for t in plan.loader.tensors) for plan in plans}) > 1:
            raise UnfitError("samples of different clients have different shapes or types")
        self.steps = max(plan.steps for plan in plans)
        self.batch_size = first.batch_size
        bytes_by_step = sum(t[:1].numel() * t.element_size() for t in first.tensors) * m * first.batch_size
        self.length = min(self.steps, max(1, BLOCK_BYTES // max(1, bytes_by_step)))

    def __iter__(self) -> Iterator[Block]:
        return (self._block(first) for first in range(0, self.steps, self.length))

    def _block(self, first: int) -> Block:
        sizes = np.zeros((self.length, self.m), dtype=np.int64)
        rows = []
        for i, plan in enumerate(self.plans):
            own = plan.rows[first : first + self.length]
            sizes[: len(own), i] = plan.sizes[first : first + self.length]
            if len(own) < self.length:
                own = torch.cat([own, plan.rows[-1:].expand(self.length - len(own), -1)])
            rows.append(own.reshape(-1))
        batch = self._gathered(torch.stack(rows + rows[:1] * (self.m - len(rows))))
        counts = torch.from_numpy(sizes).to(self.like.device)
        inside = torch.arange(self.batch_size, device=self.like.device) < counts.unsqueeze(-1)
        weights = inside.to(self.like.dtype) / counts.clamp(min=1).to(self.like.dtype).unsqueeze(-1)
        shape = (self.m, self.length, self.batch_size)
        tensors = [part.to(self.like.device).view(*shape, *part.shape[1:]) for part in batch]
        steps = min(self.length, self.steps - first)
        return Block(tensors, weights[:steps], counts[:steps], steps)

    def _gathered(self, rows: Tensor) -> list[Tensor]:
        """The samples of ``rows`` (m, T * B), one after another, as the loaders' batches would hold them."""
        loaders = [plan.loader for plan in self.plans]
        first = loaders[0]
        if all(a is b for loader in loaders[1:] for a, b in zip(loader.tensors, first.tensors, strict=True)):
            batch = [tensor.index_select(0, rows.view(-1)) for tensor in first.tensors]
        else:
            batch = [tensor.new_empty(self.m, rows.shape[1], *tensor.shape[1:]) for tensor in first.tensors]
            for i, own in enumerate(rows):
                source = loaders[i if i < len(loaders) else 0].tensors
                for out, tensor in zip(batch, source, strict=True):
                    torch.index_select(tensor, 0, own, out=out[i])
            batch = [part.flatten(0, 1) for part in batch]
        return list(self.convert(batch if first.transform is None else first.transform(batch)))
