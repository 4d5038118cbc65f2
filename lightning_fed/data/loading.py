"""Collation, the order of a client's samples, and options of ``DataLoader``, as users set them.

Also count the samples of a batch: from the positions that the loader was given, since a batch may be anything.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import cached_property
from itertools import accumulate, islice
from typing import Any

import numpy as np
import torch
from torch import Generator, Tensor
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    Dataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
    SubsetRandomSampler,
    WeightedRandomSampler,
)

from lightning_fed.core.memory import ClientId
from lightning_fed.core.validation import is_whole
from lightning_fed.data.tensor_loader import TensorLoader
from lightning_fed.lightning import isolate_rng

#: Makes a batch from a list of samples.
Collate = Callable[[list[Any]], Any]
#: Gives the positions of the samples of one epoch, in their order, drawn from the generator.
EpochSampler = Callable[[Dataset[Any], Generator], Iterable[int]]

#: Arguments of ``DataLoader`` that are not for ``loader_options``, and where each is set.
SET_ELSEWHERE = {
    "dataset": "train=, val= and test=",
    "batch_size": "batch_size= and eval_batch_size=",
    "shuffle": "sampler=; without one, training data are shuffled",
    "sampler": "sampler=",
    "batch_sampler": "sampler= and batch_size=",
    "drop_last": "drop_last=",
    "generator": "the seed of the FederatedServer",
    "in_order": "the seed: batches come in the order that was drawn",
}

#: Samplers of torch's own, whose length is the number of positions that they give.
COUNTED = (RandomSampler, SequentialSampler, SubsetRandomSampler, WeightedRandomSampler, list)


def check_callable(name: str, value: object, example: str) -> None:
    """Refuse an argument that is neither None nor callable."""
    if value is not None and not callable(value):
        raise TypeError(f"{name} must be a function such as {example}, got {value!r}.")


def loader_arguments(options: Mapping[str, Any] | None) -> dict[str, Any]:
    """Check arguments for ``DataLoader`` by name, then by torch itself.

    >>> loader_arguments({"num_workers": 2, "timeout": 5})
    {'num_workers': 2, 'timeout': 5}
    """
    if options is None:
        return {}
    if not isinstance(options, Mapping):
        raise TypeError(f"loader_options must be a mapping such as {{'pin_memory': True}}, got {options!r}.")
    known = [name for name in inspect.signature(DataLoader).parameters if name not in SET_ELSEWHERE]
    for name in options:
        if name in SET_ELSEWHERE:
            raise ValueError(f"loader_options cannot hold {name!r}, which is set by {SET_ELSEWHERE[name]}.")
        if name not in known:
            raise ValueError(f"DataLoader has no option {name!r} for loader_options. It has {', '.join(known)}.")
    check_callable("collate_fn", options.get("collate_fn"), "torch.nn.utils.rnn.pack_sequence")
    workers = options.get("num_workers", 0)
    if not is_whole(workers) or workers < 0:
        raise ValueError(f"num_workers must be a whole number >= 0, got {workers!r}.")
    try:
        DataLoader([0], **options)  # type: ignore[arg-type]
    except (TypeError, ValueError) as error:
        raise type(error)(f"loader_options={dict(options)} with num_workers={workers}: {error}") from error
    return dict(options)


def drawn_order(
    sampler: EpochSampler, dataset: Dataset[Any], generator: Generator, whose: str, most: int | None = None
) -> list[int]:
    """At most ``most`` positions that a user's sampler gives for one epoch; refuse values that are not positions.

    >>> drawn_order(lambda dataset, generator: reversed(range(len(dataset))), ["a", "b", "c"], Generator(), "ann")
    [2, 1, 0]
    """
    given = sampler(dataset, generator)
    if not isinstance(given, Iterable):
        raise TypeError(
            f"sampler must give positions of samples, such as a torch Sampler or a list; it gave {given!r} for {whose}."
        )
    samples = len(dataset)  # type: ignore[arg-type]
    order = [_position(index, samples, whose) for index in islice(given, most)]
    if not order:
        raise ValueError(f"sampler gave no samples for {whose}, which has {samples}. Give one position or more.")
    return order


def _position(index: object, samples: int, whose: str) -> int:
    number = index.item() if isinstance(index, Tensor | np.generic) and index.ndim == 0 else index
    if not is_whole(number):
        raise TypeError(
            f"sampler must give whole numbers, one for each sample (a Sampler, not a BatchSampler or a mask); it gave"
            f" {index!r} for {whose}."
        )
    if not 0 <= number < samples:
        raise ValueError(f"sampler gave position {number} for {whose}, whose samples are 0 to {samples - 1}.")
    return number


def cut_order(order: list[int], batch_size: int, drop_last: bool) -> list[Tensor]:
    """The batches of one epoch.

    >>> [batch.tolist() for batch in cut_order([4, 0, 4], 2, drop_last=False)]
    [[4, 0], [4]]
    """
    batches = torch.split(torch.tensor(order), batch_size)
    return [batch for batch in batches if len(batch) == batch_size or not drop_last]


def fresh_generator() -> Generator:
    """A generator seeded from torch's global stream, as torch's samplers do it."""
    return Generator().manual_seed(int(torch.empty((), dtype=torch.int64).random_().item()))


class PooledOrder(Sampler[int]):
    """The positions that a sampler gives for each client, in one pool and one random order; new in every epoch.

    Args:
        clients: data by client, in the order of the pool.
    """

    def __init__(self, sampler: EpochSampler, clients: Mapping[ClientId, Dataset[Any]]) -> None:
        self.sampler, self.clients = sampler, dict(clients)

    def __iter__(self) -> Iterator[int]:
        generator = fresh_generator()
        firsts = accumulate((len(data) for data in self.clients.values()), initial=0)  # type: ignore[arg-type]
        pool = [
            first + position
            for first, (cid, dataset) in zip(firsts, self.clients.items(), strict=False)
            for position in drawn_order(self.sampler, dataset, generator, f"client {cid!r}")
        ]
        for place in torch.randperm(len(pool), generator=generator).tolist():
            yield pool[place]

    def __len__(self) -> int:
        return self._length

    @cached_property
    def _length(self) -> int:
        """The sum of the samplers' lengths; raises a TypeError, which Lightning handles, if one has no length."""
        with isolate_rng():
            given: list[Any] = [self.sampler(dataset, Generator()) for dataset in self.clients.values()]
        return sum(len(order) for order in given)


def known_sizes(loader: object) -> list[int] | None:
    """The number of samples of each batch; None if the loader does not reveal which samples it takes.

    >>> known_sizes(DataLoader(range(5), batch_size=2, collate_fn=str)), known_sizes(iter([]))
    ([2, 2, 1], None)
    """
    if type(loader) is TensorLoader:
        return loader.sizes()
    if type(loader) is not DataLoader:
        return None
    batches = loader.batch_sampler
    if isinstance(batches, list):
        return [len(batch) for batch in batches]
    if type(batches) is BatchSampler and type(batches.sampler) in COUNTED:
        full, rest = divmod(len(batches.sampler), batches.batch_size)  # type: ignore[arg-type]
        return [batches.batch_size] * full + [rest] * (rest > 0 and not batches.drop_last)
    return None


def counted(loader: Iterable[Any]) -> Iterator[tuple[Any, int | None]]:
    """Batches, each with its number of samples, or with None if the loader does not reveal it."""
    sizes = known_sizes(loader)
    if sizes is None:
        return ((batch, None) for batch in loader)
    return zip(loader, sizes, strict=True)
