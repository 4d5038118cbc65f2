"""The batches of a visit if the user's ``sampler`` decides the order of samples and the length of an epoch."""

from __future__ import annotations

from collections.abc import Callable
from itertools import accumulate, pairwise
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.randomness import seed_global, torch_generator
from lightning_fed.data.batches import limited_visit
from lightning_fed.data.loading import cut_order
from lightning_fed.lightning import isolate_rng
from lightning_fed.trainer.hooks import Visit

#: Returns the positions of a local epoch, from its number and the maximum number of positions.
Draw = Callable[[int, int | None], list[int]]


def sampled_batches(trainer: Any, work: LocalWork, visit: Visit) -> list[list[Tensor]]:
    """The batches of each local epoch of a visit, as ``local_steps`` or ``local_epochs`` cut them."""
    data, share = trainer.datamodule, visit.work
    draw = _draw_of(data, work, visit)
    if work.steps:
        return cut_stream(draw, data.batch_size, limited_visit(trainer, max(1, int(share * work.steps))))
    count = max(1, int(share * (work.epochs or 1)))
    epochs = [cut_order(draw(epoch, None), data.batch_size, data.drop_last) for epoch in range(count)]
    total = sum(map(len, epochs))
    if not total:
        raise ValueError(
            f"sampler gives less than one batch of {data.batch_size} samples, and drop_last=True leaves out short"
            " batches. Use drop_last=False, a smaller batch_size, a longer sampler, or local_steps."
        )
    return _first(epochs, limited_visit(trainer, total))


def cut_stream(draw: Draw, batch_size: int, steps: int) -> list[list[Tensor]]:
    """Cut a stream of epochs into batches of one size: ``batch_size``, or the length of the first epoch if shorter.

    A batch belongs to the epoch in which it begins.

    >>> epochs = cut_stream(lambda epoch, most: [10 * epoch, 10 * epoch + 1, 10 * epoch + 2][:most], 2, steps=4)
    >>> [[batch.tolist() for batch in batches] for batches in epochs]
    [[[0, 1], [2, 10]], [[11, 12]], [[20, 21]]]
    """
    stream = draw(0, steps * batch_size)
    size, begins = min(batch_size, len(stream)), [0]
    while len(stream) < steps * size:
        begins.append(len(stream))
        stream = stream + draw(len(begins) - 1, steps * size - len(stream))
    batches = list(torch.tensor(stream[: steps * size]).view(steps, size))
    firsts = [first for begin in begins if (first := -(-begin // size)) < steps]
    return [batches[first:following] for first, following in pairwise([*firsts, steps])]


def _draw_of(data: Any, work: LocalWork, visit: Visit) -> Draw:
    """Make draws functions of (seed, round, client, epoch), also for a sampler that ignores the generator."""

    def draw(epoch: int, most: int | None) -> list[int]:
        key = (work.seed, visit.round, visit.client, epoch, "sampler")
        with isolate_rng():
            seed_global(*key)
            order: list[int] = data.sampled_order(visit.client, torch_generator(*key), most)
        return order

    return draw


def _first(epochs: list[list[Tensor]], count: int) -> list[list[Tensor]]:
    """The first ``count`` batches of all epochs, by epoch."""
    before = accumulate(map(len, epochs), initial=0)
    return [epoch[: count - done] for epoch, done in zip(epochs, before, strict=False) if done < count]
