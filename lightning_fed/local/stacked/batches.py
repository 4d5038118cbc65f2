"""Draw the minibatches of many clients' visits at once, as rows of tensors."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.data.batches import cut_visit, orders_of
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.tensor_loader import Memory, Transform, in_memory, is_row_by_row
from lightning_fed.lightning import is_overridden, pl
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.trainer.hooks import Visit

#: Bytes of the batches of a stack that are gathered at once; it limits the number of steps per block.
BLOCK_BYTES = 8 * 2**20


@dataclass(frozen=True, eq=False)
class Plan:
    """The batches of one visit, equal to a loader's: ``rows`` (S, B), of which the first ``sizes`` (S,) are used."""

    tensors: Sequence[Tensor]
    transform: Transform | None
    rows: Tensor
    sizes: NDArray[np.int64]

    @classmethod
    def all_of(cls, trainer: pl.Trainer, work: LocalWork, visits: Sequence[Visit]) -> list[Plan]:
        """Plan several visits at once; sets ``visit.planned``."""
        data: Any = trainer.datamodule
        check_plannable(data)
        stored = [_in_memory(data, visit.client) for visit in visits]
        samples = [len(tensors[0] if rows is None else rows) for tensors, rows, _ in stored]
        # cut_visit depends on samples and work only, so clients that agree in both share one cut
        size, drop, kinds = data.batch_size, data.drop_last, list(zip(samples, (v.work for v in visits), strict=True))
        by_kind = {kind: cut_visit(trainer, work, kind[0], size, drop, kind[1]) for kind in set(kinds)}
        cuts = [by_kind[kind] for kind in kinds]
        orders = orders_of(trainer, work.seed, visits[0].round, [visit.client for visit in visits], samples, cuts)
        plans = []
        for visit, (tensors, own, transform), cut, order in zip(visits, stored, cuts, orders, strict=True):
            visit.planned = cut.steps
            rows = torch.from_numpy(cut.rows(order))
            plans.append(cls(tensors, transform, rows if own is None else own[rows], cut.sizes()))
        return plans

    @property
    def steps(self) -> int:
        return len(self.sizes)

    @property
    def batch_size(self) -> int:
        """The number of samples of a batch that is not short."""
        return self.rows.shape[1]

    @property
    def kind(self) -> Hashable:
        """The shapes and types of a sample."""
        return kind_of(self.tensors)


def check_plannable(data: FederatedDataModule) -> None:
    """Refuse batches that are not rows of tensors in the order of docs/draws.md."""
    for name in ("collate_fn", "sampler"):
        if getattr(data, name) is not None:
            raise UnfitError(f"the data have a {name} of their own")
    if is_overridden("client_dataloader", data, FederatedDataModule):
        raise UnfitError(f"{type(data).__name__} overrides client_dataloader")


def _in_memory(data: FederatedDataModule, client: ClientId) -> Memory:
    memory = in_memory(data.client_dataset(client))
    if memory is None:
        raise UnfitError(f"the data of client {client!r} are not tensors in memory")
    if not is_row_by_row(memory[2]):
        raise UnfitError(f"the transform of client {client!r} is not declared row_by_row")
    return memory


def kind_of(tensors: Sequence[Tensor]) -> Hashable:
    """The shapes and types of a sample."""
    return tuple((tensor.shape[1:], tensor.dtype) for tensor in tensors)


class Batches:
    """The batches of all visits of a stack, gathered block by block.

    Args:
        convert: converts a batch to the precision of the module.
        like: a tensor with the precision and the device of the weights.
        scratch: memory that all stacks reuse for their batches.

    ``sizes`` (m, S + 1) has the size of every batch; 0 after a client's last one.
    """

    def __init__(
        self, plans: Sequence[Plan], convert: Callable[[Any], Any], like: Tensor, scratch: dict[Hashable, Tensor]
    ) -> None:
        first = plans[0]
        if any(plan.transform != first.transform for plan in plans):  # one call transforms the batches of all clients
            raise UnfitError("clients have different transforms")
        self.convert, self.like, self.transform, self.batch_size = convert, like, first.transform, first.batch_size
        self.plans, self.scratch = plans, scratch
        self.steps = max(plan.steps for plan in plans)
        # one column more than steps: a client that has finished reads size 0 there
        self.sizes = np.zeros((len(plans), self.steps + 1), dtype=np.int64)
        for own, plan in zip(self.sizes, plans, strict=True):
            own[: plan.steps] = plan.sizes
        bytes_by_step = sum(t[:1].numel() * t.element_size() for t in first.tensors) * len(plans) * self.batch_size
        most = max(1, BLOCK_BYTES // max(1, bytes_by_step))
        # steps per block; blocks are even, because the last one is filled up with repeated batches
        self.block = -(-self.steps // -(-self.steps // most))

    def take(self, steps: Sequence[Any]) -> list[Tensor]:
        """Gather some steps of each client, client by client: tensors (sum of T_i, B, ...), until the next call."""
        rows = [plan.rows[part].flatten() for plan, part in zip(self.plans, steps, strict=True)]
        lengths = [len(own) for own in rows]
        taken = [self._room(k, sum(lengths), tensor) for k, tensor in enumerate(self.plans[0].tensors)]
        for k, out in enumerate(taken):
            for plan, own, part in zip(self.plans, rows, torch.split(out, lengths), strict=True):
                torch.index_select(plan.tensors[k], 0, own, out=part)
        batch = self.convert(taken if self.transform is None else self.transform(taken))
        return [part.to(self.like.device).unflatten(0, (-1, self.batch_size)) for part in batch]

    def _room(self, number: int, rows: int, like: Tensor) -> Tensor:
        """Reuse memory for ``rows`` rows like those of a tensor: allocating memory takes longer than filling it."""
        size, key = rows * like[:1].numel(), (number, like.dtype, like.device)
        room = self.scratch.get(key)
        if room is None or len(room) < size:
            with torch.inference_mode(False):  # tensors made in inference mode cannot be written outside it
                room = torch.empty(size, dtype=like.dtype, device=like.device)
            if size * like.element_size() <= BLOCK_BYTES:
                self.scratch[key] = room
        return room[:size].view(rows, *like.shape[1:])
