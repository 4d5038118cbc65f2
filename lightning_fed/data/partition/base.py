"""What partitioners are and read, and the usual ones."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import is_whole, positive, whole
from lightning_fed.data.columns import column, column_labels, is_huggingface
from lightning_fed.data.targets import is_torchvision, stored_labels

Indices = NDArray[np.int64]

#: How often Dirichlet redraws before it gives up on ``min_examples``.
MAX_DRAWS = 1000


class Partition(ABC):
    """Law by which the samples of one dataset are dealt to clients.

    >>> class EvenOdd(Partition):
    ...     def __call__(self, dataset):
    ...         return {"even": list(range(0, len(dataset), 2)), "odd": list(range(1, len(dataset), 2))}
    >>> EvenOdd()(TensorDataset(torch.zeros(5, 2)))
    {'even': [0, 2, 4], 'odd': [1, 3]}
    """

    @abstractmethod
    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        """The indices of every client's samples; no index is dealt twice."""


@dataclass(frozen=True)
class ByKey(Partition):
    """Samples that share a key belong to one client: the natural partition by writer, speaker, hospital.

    Args:
        key: an index or a name (the client of a sample is ``sample[key]``), a function from sample to client, or a
            sequence with one client per sample, in the order of the dataset.

    >>> ByKey(["ann", "bob", "ann"])(TensorDataset(torch.zeros(3, 2)))
    {'ann': [0, 2], 'bob': [1]}
    >>> ByKey(1)(TensorDataset(torch.zeros(3, 2), torch.tensor([7, 5, 7])))
    {7: [0, 2], 5: [1]}
    """

    key: int | str | Callable[[Any], ClientId] | Sequence[ClientId]

    def __post_init__(self) -> None:
        check_entry(self, "key", "client")

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        dealt: dict[ClientId, list[int]] = {}
        for index, key in enumerate(entries_of(dataset, self.key, "ByKey.key", "client")):
            dealt.setdefault(as_client_id(key, f"The key of sample {index}"), []).append(index)
        return dealt


@dataclass(frozen=True)
class IID(Partition):
    """Samples are shuffled and dealt evenly: sizes differ by one at most.

    >>> dealt = IID(clients=2)(TensorDataset(torch.zeros(5, 1)))
    >>> [len(indices) for indices in dealt.values()]
    [3, 2]
    """

    clients: int
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "clients", 1)
        whole(self, "seed")

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        n = num_samples(dataset, "the dataset")
        enough(self, n, self.clients, "one sample per client")
        order = numpy_generator(self.seed, "IID").permutation(n)
        return by_position(np.array_split(order, self.clients))


@dataclass(frozen=True)
class Dirichlet(Partition):
    r"""Every class is dealt in proportions :math:`p \sim \mathrm{Dirichlet}(\alpha, \dots, \alpha)` (arXiv:1909.06335).

    Args:
        alpha: positive; large gives every client the same mix of labels, small gives each a few labels.
        min_examples: draws that leave a client with fewer samples are rejected.

    >>> dataset = TensorDataset(torch.zeros(60, 1), torch.arange(60) % 3)
    >>> dealt = Dirichlet(clients=4, alpha=0.5, min_examples=2)(dataset)
    >>> sum(len(indices) for indices in dealt.values()), min(len(indices) for indices in dealt.values()) >= 2
    (60, True)
    """

    clients: int
    alpha: float
    seed: int = 0
    min_examples: int = 1

    def __post_init__(self) -> None:
        whole(self, "clients", 1)
        positive(self, "alpha", "Small is heterogeneous, large is iid; start from 0.5.")
        whole(self, "seed")
        whole(self, "min_examples", 1)

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        n = num_samples(dataset, "the dataset")
        enough(self, n, self.clients * self.min_examples, f"{self.min_examples} per client")
        rng = numpy_generator(self.seed, "Dirichlet")
        _, label = np.unique(classes_of(dataset, self), return_inverse=True)
        held: list[list[Indices]] = [[] for _ in range(self.clients)]
        for c, counts in enumerate(self._counts(np.bincount(label), rng)):
            of_class = rng.permutation(np.flatnonzero(label == c))
            for i, part in enumerate(np.split(of_class, np.cumsum(counts)[:-1])):
                held[i].append(part)
        return by_position([np.concatenate(parts) for parts in held])

    def _counts(self, sizes: Indices, rng: np.random.Generator) -> Indices:
        """Samples of each class (rows) by client, of the first draw that gives every client ``min_examples``."""
        best = 0
        for _ in range(MAX_DRAWS):
            shares = rng.dirichlet(np.full(self.clients, float(self.alpha)), size=len(sizes))
            cuts = np.rint(np.cumsum(shares, axis=1)[:, :-1] * sizes[:, None]).astype(np.int64).clip(max=sizes[:, None])
            # Rounding favours the same positions in every class, so positions are shuffled.
            counts = rng.permuted(np.diff(cuts, axis=1, prepend=0, append=sizes[:, None]), axis=1)
            smallest = int(counts.sum(axis=0).min())
            if smallest >= self.min_examples:
                return counts
            best = max(best, smallest)
        raise ValueError(
            f"{self} left some client with fewer than {self.min_examples} of {sizes.sum()} samples in each of "
            f"{MAX_DRAWS} draws (the best draw left {best}). Use a larger alpha, fewer clients or smaller "
            "min_examples."
        )


@dataclass(frozen=True)
class Shards(Partition):
    """Samples are sorted by label and cut into shards, of which every client gets a few (arXiv:1602.05629).

    >>> dataset = TensorDataset(torch.zeros(8, 1), torch.tensor([0, 1, 0, 1, 0, 1, 0, 1]))
    >>> dealt = Shards(clients=2, shards_per_client=1)(dataset)
    >>> sorted(dealt.values())
    [[0, 2, 4, 6], [1, 3, 5, 7]]
    """

    clients: int
    shards_per_client: int = 2
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "clients", 1)
        whole(self, "shards_per_client", 1)
        whole(self, "seed")

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        n = num_samples(dataset, "the dataset")
        count = self.clients * self.shards_per_client
        enough(self, n, count, "one sample per shard")
        shards = np.array_split(np.argsort(labels_of(dataset), kind="stable"), count)
        hands = numpy_generator(self.seed, "Shards").permutation(count).reshape(self.clients, -1)
        return by_position([np.concatenate([shards[s] for s in hand]) for hand in hands])


@dataclass(frozen=True)
class Sizes(Partition):
    """Client i gets ``sizes[i]`` samples at random; samples beyond their sum are left out.

    >>> {cid: len(indices) for cid, indices in Sizes([1, 3])(TensorDataset(torch.zeros(9, 1))).items()}
    {0: 1, 1: 3}
    """

    sizes: Sequence[int]
    seed: int = 0

    def __post_init__(self) -> None:
        if not isinstance(self.sizes, Iterable):
            raise ValueError(f"Sizes.sizes must be a list, one whole number per client; got {self.sizes!r}.")
        sizes = tuple(self.sizes)
        if not sizes:
            raise ValueError("Sizes.sizes must name at least one client, got none.")
        for i, size in enumerate(sizes):
            if not (is_whole(size) or isinstance(size, np.integer)) or size < 1:
                raise ValueError(f"Sizes.sizes must hold whole numbers >= 1, got {size!r} for client {i}.")
        object.__setattr__(self, "sizes", tuple(int(size) for size in sizes))
        whole(self, "seed")

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        n, total = num_samples(dataset, "the dataset"), sum(self.sizes)
        enough(self, n, total, "the sum of sizes")
        order = numpy_generator(self.seed, "Sizes").permutation(n)[:total]
        return by_position(np.split(order, np.cumsum(self.sizes)[:-1]))


def check_dealt(dealt: Mapping[ClientId, Sequence[int]], n: int) -> None:
    """Refuse a partition with a client without samples, indices that do not exist, or that two clients hold.

    >>> check_dealt({"ann": [0, 2], "bob": [1]}, n=3)
    >>> check_dealt({"ann": [0, 2], "bob": [2]}, n=3)
    Traceback (most recent call last):
    ValueError: The partition dealt sample 2 more than once.
    """
    hands = [np.asarray(held, dtype=np.int64) for held in dealt.values()]
    if not hands:
        raise ValueError("The partition names no clients.")
    if empty := [cid for cid, held in zip(dealt, hands, strict=True) if not held.size]:
        raise ValueError(
            f"The partition gave no samples to client {empty[0]!r} ({len(empty)} of {len(hands)} clients). Leave such"
            " clients out, or deal to fewer."
        )
    indices, counts = np.unique(np.concatenate(hands), return_counts=True)
    if indices[0] < 0 or indices[-1] >= n:
        raise ValueError(f"The partition dealt indices {indices[0]} to {indices[-1]}; the dataset has 0 to {n - 1}.")
    if (counts > 1).any():
        raise ValueError(f"The partition dealt sample {indices[counts > 1][0]} more than once.")


def hold_out(indices: Sequence[int], fractions: Mapping[str, float], rng: np.random.Generator) -> dict[str, list[int]]:
    """Cut one client's indices into ``"train"`` and the named fractions; names that get nothing are left out.

    >>> hold_out([4, 5, 6, 7], {"test": 0.25, "val": 0.0}, np.random.default_rng(0)).keys()
    dict_keys(['train', 'test'])
    """
    left = rng.permutation(np.asarray(indices, dtype=np.int64))
    held: dict[str, list[int]] = {}
    for name, fraction in fractions.items():
        wanted = max(1, round(fraction * len(indices))) if fraction else 0
        take = max(0, min(wanted, len(left) - 1))
        if take:
            held[name], left = np.sort(left[:take]).tolist(), left[take:]
    return {"train": np.sort(left).tolist(), **held}


def num_samples(dataset: object, name: str) -> int:
    """``len(dataset)`` of a map-style dataset; refuse other objects, called ``name`` in the error.

    >>> num_samples([10, 20, 30], "train data")
    3
    >>> num_samples(iter([10, 20]), "train data")
    Traceback (most recent call last):
    TypeError: train data must be a map-style Dataset, with __getitem__ and __len__; got list_iterator.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, IterableDataset):
        raise TypeError(
            f"{name} is an IterableDataset ({kind}), which cannot be shuffled or counted. Give a map-style Dataset, "
            "with __getitem__ and __len__; list(dataset) is one, if it fits in memory."
        )
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise TypeError(f"{name} must be a map-style Dataset, with __getitem__ and __len__; got {kind}.")
    return len(dataset)


def labels_of(dataset: Dataset[Any]) -> NDArray[Any]:
    """One label per sample, read from memory if the dataset allows it.

    >>> labels_of(Subset(TensorDataset(torch.zeros(3, 2), torch.tensor([5, 6, 7])), [2, 0]))
    array([7, 5])
    """
    labels = _find_labels(dataset)
    n = num_samples(dataset, "the dataset")
    if labels.shape != (n,) or labels.dtype == object:
        raise ValueError(
            f"Wanted one label per sample, shape ({n},); got {labels.dtype} of shape {labels.shape} from "
            f"{type(dataset).__name__}. The label is the last entry of a sample; a dataset may hold them as .targets."
        )
    return labels


def _find_labels(dataset: Any) -> NDArray[Any]:
    # Exact types: a subclass may change what its samples are.
    if type(dataset) is TensorDataset:
        return dataset.tensors[-1].cpu().numpy()
    if is_huggingface(dataset):
        return column_labels(dataset)
    if type(dataset) is Subset and is_huggingface(dataset.dataset):
        return column_labels(dataset.dataset, dataset.indices)
    if type(dataset) is Subset:
        return _find_labels(dataset.dataset)[np.asarray(dataset.indices, dtype=np.int64)]
    if type(dataset) is ConcatDataset:
        return np.concatenate([_find_labels(part) for part in dataset.datasets])
    if is_torchvision(dataset):
        stored = stored_labels(dataset)
        return np.asarray([_label(dataset[i], i) for i in range(len(dataset))]) if stored is None else stored
    targets = getattr(dataset, "targets", None)
    if targets is not None and len(targets) == len(dataset):
        return np.asarray(targets.cpu() if isinstance(targets, torch.Tensor) else targets)
    return np.asarray([_label(dataset[i], i) for i in range(len(dataset))])


def _label(sample: Any, index: int) -> Any:
    try:
        # A bare tensor has a last entry too, but that is a feature.
        label = sample[-1] if isinstance(sample, (tuple, list)) else sample["label"]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"Sample {index} has no label: it is a {type(sample).__name__}. Samples must be tuples that end with the "
            "label, or mappings with a 'label', unless the dataset has .targets."
        ) from error
    return label.tolist() if isinstance(label, torch.Tensor) else label


def classes_of(dataset: Dataset[Any], rule: Partition) -> NDArray[Any]:
    """One class per sample; refuse labels that are real numbers."""
    labels = labels_of(dataset)
    if np.issubdtype(labels.dtype, np.floating) and not np.array_equal(labels, np.rint(labels)):
        raise ValueError(
            f"{type(rule).__name__} deals classes, but the labels are real numbers. Use IID, Sizes, Shards or"
            " Continuous(by=-1)."
        )
    return labels


def check_entry(rule: Partition, name: str, what: str) -> None:
    """Refuse an argument that does not say where the entry of a sample is; freeze a sequence of entries."""
    value = getattr(rule, name)
    if isinstance(value, (torch.Tensor, np.ndarray)):
        object.__setattr__(rule, name, tuple(value.tolist()))
    elif isinstance(value, Sequence) and not isinstance(value, str):
        object.__setattr__(rule, name, tuple(value))
    elif isinstance(value, bool) or not (isinstance(value, (int, str)) or callable(value)):
        raise ValueError(
            f"{type(rule).__name__}.{name} must be an index or a name within the sample, a function of the sample, or "
            f"one {what} per sample; got {value!r}."
        )


def entries_of(dataset: Dataset[Any], key: Any, name: str, what: str) -> Sequence[Any]:
    """One entry per sample: given, computed from the sample, or found in it; read from memory if possible."""
    n = num_samples(dataset, "the dataset")
    if isinstance(key, tuple):
        if len(key) != n:
            raise ValueError(f"{name} has {len(key)} {what}s for {n} samples. Give one {what} per sample.")
        return key
    if callable(key):
        return [key(dataset[i]) for i in range(n)]
    if isinstance(key, int) and type(dataset) is TensorDataset and -len(dataset.tensors) <= key < len(dataset.tensors):
        return dataset.tensors[key].tolist()
    if isinstance(key, str) and is_huggingface(dataset):
        return column(dataset, key)
    try:
        return [dataset[i][key] for i in range(n)]
    except (IndexError, KeyError, TypeError) as error:
        raise ValueError(
            f"{name} is {key!r}, but samples have no such entry: they are of type {type(dataset[0]).__name__}. "
            f"Give an index or a name within the sample, a function of it, or one {what} per sample."
        ) from error


def as_client_id(key: Any, name: str) -> ClientId:
    """A client's id as a Python number or string; refuse other objects, called ``name`` in the error."""
    if isinstance(key, (torch.Tensor, np.generic, np.ndarray)):
        key = key.tolist()
    if isinstance(key, bool) or not isinstance(key, (int, str)):
        raise ValueError(f"{name} must be a whole number or a string, got {key!r}.")
    return key


def by_position(parts: Sequence[NDArray[Any]]) -> dict[ClientId, list[int]]:
    """Clients 0, 1, 2, ... and their indices, sorted."""
    return {i: np.sort(part).tolist() for i, part in enumerate(parts)}


def enough(partition: Partition, n: int, needed: int, why: str) -> None:
    """Refuse a dataset that is too small."""
    if n < needed:
        raise ValueError(
            f"{type(partition).__name__} needs at least {needed} samples ({why}), but the dataset has {n}."
        )
