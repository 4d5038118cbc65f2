"""Cut a client's samples into the batches of a visit, equally in every engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.draws import Orders, epoch_orders
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId


@dataclass(frozen=True)
class Cut:
    """The ``steps`` batches of one visit, cut from the first ``kept`` samples of each epoch's order.

    Without ``per_epoch``, all batches have ``size`` samples: epochs follow each other in one stream, which is cut
    across their borders. With it, every epoch has ``per_epoch`` batches, of which the last may be short.

    >>> Cut(kept=5, size=2, steps=3).sizes().tolist(), Cut(kept=5, size=2, steps=3, per_epoch=3).sizes().tolist()
    ([2, 2, 2], [2, 2, 1])
    """

    kept: int
    size: int
    steps: int
    per_epoch: int | None = None

    @property
    def epochs(self) -> int:
        """The number of epochs that the visit begins."""
        return -(-self.steps * self.size // self.kept) if self.per_epoch is None else -(-self.steps // self.per_epoch)

    def first_steps(self) -> list[int]:
        """The first step of each epoch: the step of the first batch that begins in it."""
        if self.per_epoch is not None:
            return [epoch * self.per_epoch for epoch in range(self.epochs)]
        firsts = [-(-epoch * self.kept // self.size) for epoch in range(self.epochs)]
        return [first for first in firsts if first < self.steps]

    @cache  # noqa: B019  # depends on numbers alone, and many clients share them
    def sizes(self) -> NDArray[np.int64]:
        """The number of samples of each batch."""
        sizes = np.full(self.steps, self.size)
        if self.per_epoch is not None:
            short = self.kept - (self.per_epoch - 1) * self.size
            sizes[self.per_epoch - 1 :: self.per_epoch] = short
        return sizes

    def rows(self, orders: Orders) -> Orders:
        """Positions (steps, size) of the samples; a short batch is filled up with the first position of its epoch."""
        kept = orders[:, : self.kept]
        if self.per_epoch is not None and (missing := self.per_epoch * self.size - self.kept):
            kept = np.concatenate([kept, np.repeat(kept[:, :1], missing, axis=1)], axis=1)
        return kept.reshape(-1)[: self.steps * self.size].reshape(self.steps, self.size)


def cut_visit(trainer: Any, work: LocalWork, samples: int, batch_size: int, drop_last: bool, share: float) -> Cut:
    """The batches of a client that holds ``samples`` samples and does a ``share`` of its ``work``."""
    kept = samples
    if trainer.overfit_batches:  # every epoch has the same first batches
        kept = min(samples, limited(trainer.limit_train_batches, -(-samples // batch_size)) * batch_size)
    if work.steps:
        return Cut(kept, min(batch_size, kept), limited_visit(trainer, max(1, int(share * work.steps))))
    if drop_last:
        kept -= kept % batch_size
    if not kept:
        raise ValueError(
            f"{samples} samples are less than one batch of {batch_size}, and drop_last=True leaves out short batches."
            " Use drop_last=False, a smaller batch_size, or local_steps."
        )
    size = min(batch_size, kept)
    per_epoch = -(-kept // size)
    epochs = max(1, int(share * (work.epochs or 1)))
    return Cut(kept, size, limited_visit(trainer, epochs * per_epoch), per_epoch)


def limited_visit(trainer: Any, batches: int) -> int:
    """``limit_train_batches`` limits a whole visit; under ``overfit_batches`` it limits each epoch instead."""
    return batches if trainer.overfit_batches else limited(trainer.limit_train_batches, batches)


def limited(limit: float, batches: int) -> int:
    return min(limit, batches) if isinstance(limit, int) else max(1, int(limit * batches))


def orders_of(
    trainer: Any, seed: int, round: int, clients: Sequence[ClientId], samples: Sequence[int], cuts: Sequence[Cut]
) -> list[Orders]:
    """The order of each client's samples in each epoch of its visit; under ``overfit_batches`` as they are stored."""
    epochs = [cut.epochs for cut in cuts]
    if trainer.overfit_batches:
        return [np.tile(np.arange(n), (count, 1)) for n, count in zip(samples, epochs, strict=True)]
    return epoch_orders(seed, round, clients, samples, epochs)
