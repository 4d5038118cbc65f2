"""The minibatches of many clients' visits, drawn at once, as rows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
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
    """Some steps of a stack: tensors (T, m, B, ...), weights of samples (T, m, B), batch sizes (T, m)."""

    batch: list[Tensor]
    weights: Tensor
    sizes: Tensor


def blocks(plans: Sequence[Plan], m: int, convert: Callable[[Any], Any], like: Tensor) -> list[Callable[[], Block]]:
    """The steps of all visits side by side, in blocks that are gathered when they are called for.

    A visit that has ended goes on with samples that count for nothing, and so do the visits that fill the stack up to
    ``m``. ``like`` has the precision and the device of the weights.
    """
    steps = max(plan.steps for plan in plans)
    batch_size = max(plan.loader.batch_size for plan in plans)
    row_bytes = sum(t[:1].numel() * t.element_size() for t in plans[0].loader.tensors)
    length = max(1, BLOCK_BYTES // max(1, row_bytes * m * batch_size))
    return [
        partial(_block, plans, m, first, min(first + length, steps), batch_size, convert, like)
        for first in range(0, steps, length)
    ]


def _block(
    plans: Sequence[Plan],
    m: int,
    first: int,
    last: int,
    batch_size: int,
    convert: Callable[[Any], Any],
    like: Tensor,
) -> Block:
    sizes = np.zeros((last - first, m), dtype=np.int64)
    rows = torch.zeros(last - first, m, batch_size, dtype=torch.int64)
    for i, plan in enumerate(plans):
        own = min(plan.steps, last) - first
        if own > 0:
            sizes[:own, i] = plan.sizes[first:last]
            rows[:own, i, : plan.rows.shape[1]] = plan.rows[first:last]
            rows[:own, i, plan.rows.shape[1] :] = plan.rows[first:last, :1]
        rows[max(own, 0) :, i] = plan.rows[-1, 0]
    batch = convert(_gathered([plan.loader for plan in plans], rows))
    counts = torch.from_numpy(sizes).to(like.device)
    inside = torch.arange(batch_size, device=like.device) < counts.unsqueeze(-1)
    weights = inside.to(like.dtype) / counts.clamp(min=1).to(like.dtype).unsqueeze(-1)
    return Block([part.to(like.device).view(*rows.shape, *part.shape[1:]) for part in batch], weights, counts)


def _gathered(loaders: Sequence[TensorLoader], rows: Tensor) -> list[Tensor]:
    """Samples (T * m * B, ...) as the loaders' batches would hold them."""
    first = loaders[0]
    if any(loader.transform != first.transform for loader in loaders):
        raise UnfitError("clients have different transforms")
    if all(a is b for loader in loaders[1:] for a, b in zip(loader.tensors, first.tensors, strict=True)):
        rows[:, len(loaders) :] = first.rows[0]  # any row that there is
        batch = [tensor[rows.view(-1)] for tensor in first.tensors]
    else:
        batch = [tensor.new_zeros(*rows.shape, *tensor.shape[1:]) for tensor in first.tensors]
        for i, loader in enumerate(loaders):
            for out, tensor in zip(batch, loader.tensors, strict=True):
                out[:, i] = tensor[rows[:, i].reshape(-1)].view(rows[:, i].shape + tensor.shape[1:])
        batch = [part.flatten(0, 2) for part in batch]
    return batch if first.transform is None else first.transform(batch)
