"""Functions that deal samples, as partitioners."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import derive_seed, numpy_generator, torch_generator
from lightning_fed.core.validation import whole
from lightning_fed.data.partition.base import Partition, as_client_id, check_dealt, labels_of, num_samples
from lightning_fed.data.partition.flower import Flower, is_flower

Rule = Partition | Callable[..., Mapping[ClientId, Sequence[int]] | Sequence[Sequence[int]]]
"""A partitioner, or any function that deals samples.

>>> from lightning_fed.partition import IID, Rule, deal_samples
>>> rules: list[Rule] = [IID(2), lambda dataset: [[0, 1], [2]]]
>>> [sorted(map(len, deal_samples(rule, ["a", "b", "c"]).values())) for rule in rules]
[[1, 2], [1, 2]]
"""

#: How a function may call its first argument, if it wants labels and not the dataset.
LABELS = ("labels", "targets", "y")
#: How a function may call its second argument, and what it then gets.
RANDOMNESS: dict[str, Callable[[int], Any]] = {
    "seed": lambda seed: derive_seed(seed, "partition") % 2**32,
    "rng": lambda seed: numpy_generator(seed, "partition"),
    "generator": lambda seed: torch_generator(seed, "partition"),
}


def as_partitioner(partition: Rule, seed: int = 0) -> Partition:
    """Make a partitioner of a function; a partitioner stays what it is.

    Args:
        partition: a partitioner, or a function that returns the indices of every client's samples: a mapping from
            client to indices, or a list with the indices of clients 0, 1, 2, ... Its first argument is the dataset, or
            an array with one label per sample if it is called ``labels``, ``targets`` or ``y``. A second argument is
            called ``seed`` (a whole number below 2**32), ``rng`` (a NumPy generator) or ``generator`` (a torch one).
            Or a partitioner of flwr-datasets, which sees the columns of a ``datasets.Dataset``, and of other datasets
            one column, ``"label"``.
        seed: for functions that have a second argument; a partitioner has its own.

    What a function returns is checked: every client has samples, all samples exist, and none belongs to two clients.

    >>> from torch.utils.data import TensorDataset
    >>> import torch
    >>> samples = TensorDataset(torch.zeros(6, 2), torch.tensor([0, 0, 1, 1, 0, 1]))
    >>> as_partitioner(lambda labels: [np.flatnonzero(labels == c) for c in (0, 1)])(samples)
    {0: [0, 1, 4], 1: [2, 3, 5]}
    >>> halves = as_partitioner(lambda dataset, rng: np.split(rng.permutation(len(dataset)), 2))
    >>> [len(indices) for indices in halves(samples).values()]
    [3, 3]
    """
    if isinstance(partition, Partition):
        return partition
    if is_flower(partition):
        return Flower(partition)
    if not callable(partition) or isinstance(partition, type):
        raise TypeError(
            "partition must be a Partition such as IID(clients=10), or a function from a dataset to the indices of each"
            f" client; got {partition!r}."
        )
    return Function(partition, seed)


def deal_samples(partition: Rule, dataset: Dataset[Any], seed: int = 0) -> dict[ClientId, list[int]]:
    """The indices of every client's samples, checked, for any rule that ``as_partitioner`` takes.

    >>> deal_samples(lambda dataset: {"ann": [0, 2], "bob": [1]}, ["a", "b", "c"])
    {'ann': [0, 2], 'bob': [1]}
    """
    n = num_samples(dataset, "the dataset")
    dealt = as_partitioner(partition, seed)(dataset)
    check_dealt(dealt, n)
    return dealt


@dataclass(frozen=True)
class Function(Partition):
    """The partition that a function makes; see :func:`as_partitioner`."""

    function: Callable[..., Any]
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "seed")
        _arguments(self.function)

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        n = num_samples(dataset, "the dataset")
        first, second = _arguments(self.function)
        samples = labels_of(dataset) if first in LABELS else dataset
        dealt = _by_client(self.function(samples, *(RANDOMNESS[name](self.seed) for name in second)), self.function)
        check_dealt(dealt, n)
        return dealt


def _arguments(function: Callable[..., Any]) -> tuple[str, list[str]]:
    """The name of the first argument, and of the second if the function has one that asks for randomness."""
    try:
        found = list(inspect.signature(function).parameters.values())
    except ValueError:  # written in C, without a signature
        return "", []
    placed = [p for p in found if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    many = any(p.kind is p.VAR_POSITIONAL for p in found)
    second = [p.name for p in placed[1:2] if p.name in RANDOMNESS]
    needed = [p.name for p in placed[1 + len(second) :] if p.default is p.empty]
    needed += [p.name for p in found if p.kind is p.KEYWORD_ONLY and p.default is p.empty]
    if needed or not (placed or many):
        wrong = f"it also wants {', '.join(needed)}" if needed else "it takes no positional argument"
        raise TypeError(
            f"partition {_name(function)} must take the dataset (or labels), and perhaps seed, rng or generator;"
            f" {wrong}. Bind other arguments with functools.partial."
        )
    return (placed[0].name if placed else ""), second


def _by_client(dealt: Any, function: Callable[..., Any]) -> dict[ClientId, list[int]]:
    if isinstance(dealt, Mapping):
        pairs = [(as_client_id(cid, "A client of the partition"), held) for cid, held in dealt.items()]
    elif isinstance(dealt, Sequence | np.ndarray) and not isinstance(dealt, str):
        pairs = list(enumerate(dealt))
    else:
        raise TypeError(
            f"partition {_name(function)} must return a mapping from client to indices, or a list with the indices of"
            f" each client; it returned a {type(dealt).__name__}."
        )
    return {cid: _indices(cid, held, function) for cid, held in pairs}


def _indices(cid: ClientId, held: Any, function: Callable[..., Any]) -> list[int]:
    found = np.asarray(held)
    if found.ndim != 1 or (found.size and not np.issubdtype(found.dtype, np.integer)):
        raise TypeError(
            f"partition {_name(function)} must give client {cid!r} a list of whole numbers; it gave {found.dtype} of"
            f" shape {found.shape}. (The indices of a mask are np.flatnonzero(mask).)"
        )
    return [int(index) for index in found]


def _name(function: Callable[..., Any]) -> str:
    return getattr(function, "__qualname__", None) or repr(function)
