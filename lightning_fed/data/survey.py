"""Survey the clients' data: sizes, labels and how much clients differ, as numbers and as a report.

With :math:`p_i` the label distribution of client i and :math:`p` that of all training data together, clients are
compared by the total variation and the Jensen-Shannon divergence between :math:`p_i` and :math:`p`. Both lie in [0, 1]
and are 0 for a client that is like the pool; their means weigh all clients equally.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

import numpy as np
from numpy.typing import NDArray
from torch.utils.data import Dataset, Subset

from lightning_fed.core.labels import label_of
from lightning_fed.core.memory import ClientId
from lightning_fed.data.datamodule import SPLITS, FederatedDataModule
from lightning_fed.data.partition import labels_of, num_samples

Counts = NDArray[np.int64]
Reals = NDArray[np.float64]


@dataclass(frozen=True)
class Labels:
    """How often every client has every label: ``counts`` has one row per client, one column per entry of ``names``."""

    names: list[Any]
    counts: Counts = field(repr=False)

    @property
    def p_i(self) -> Reals:
        return np.asarray(self.counts / self.counts.sum(axis=1, keepdims=True))

    @property
    def p(self) -> Reals:
        return np.asarray(self.counts.sum(axis=0) / self.counts.sum())

    @property
    def classes(self) -> Counts:
        """Number of different labels that each client has."""
        return np.asarray((self.counts > 0).sum(axis=1))

    @property
    def effective_classes(self) -> Reals:
        r""":math:`\exp(-\sum_c p_{ic} \ln p_{ic})` of each client: k if it has k labels equally often."""
        return np.exp2(_entropy(self.p_i))

    @property
    def total_variation(self) -> Reals:
        r""":math:`\frac12 \sum_c |p_{ic} - p_c|` of each client."""
        return np.asarray(0.5 * np.abs(self.p_i - self.p).sum(axis=1)).clip(0, 1)

    @property
    def jensen_shannon(self) -> Reals:
        r""":math:`H(\frac{p_i + p}2) - \frac{H(p_i) + H(p)}2` of each client, with the entropy H in bits."""
        mixed = _entropy((self.p_i + self.p) / 2)
        return np.asarray(mixed - (_entropy(self.p_i) + _entropy(self.p)) / 2).clip(0, 1)  # against rounding


def _entropy(p: Reals) -> Reals:
    return np.asarray(-(p * np.log2(np.where(p > 0, p, 1.0))).sum(axis=-1))


@dataclass(frozen=True)
class Survey:
    """Numbers of samples and labels by client.

    Args:
        title: the datamodule's ``description``, else its class.
        clients: all clients, those with training data first; arrays have one row per client, in this order.
        samples: for every split the number of samples of each client, 0 if it has none.
        labels: of the clients with training data; None if there are no classes.
        note: why there are no classes.
    """

    title: str
    clients: list[ClientId] = field(repr=False)
    samples: dict[str, Counts] = field(repr=False)
    labels: Labels | None = None
    note: str | None = None

    @property
    def clients_per_split(self) -> dict[str, int]:
        return {split: int(np.count_nonzero(n)) for split, n in self.samples.items()}

    @property
    def samples_per_split(self) -> dict[str, int]:
        return {split: int(n.sum()) for split, n in self.samples.items()}

    @property
    def sizes(self) -> Counts:
        """Training samples of each client that has any."""
        return self.samples["train"][: self.clients_per_split["train"]]

    @property
    def by_size(self) -> Counts:
        """Positions of the clients, the largest first."""
        return np.argsort(-self.sizes, kind="stable")

    @property
    def largest_share(self) -> float:
        """Share of the training samples that the largest client holds."""
        return float(self.sizes.max() / self.sizes.sum())

    @property
    def gini(self) -> float:
        r"""Gini coefficient of the sizes, :math:`\sum_{i,j} |n_i - n_j| / (2 n \sum_i n_i)`: 0 if all are equal."""
        n = len(self.sizes)
        return float((2 * np.arange(1, n + 1) - n - 1) @ np.sort(self.sizes) / (n * self.sizes.sum()))


def survey(data: FederatedDataModule) -> Survey:
    """Count the samples and labels of every client; ``data`` have been set up.

    >>> import torch
    >>> from torch.utils.data import TensorDataset
    >>> x, y = torch.zeros(4, 2), torch.zeros(4, dtype=torch.int64)
    >>> found = survey(FederatedDataModule({"ann": TensorDataset(x, y), "bob": TensorDataset(x, y + 1)}))
    >>> found.sizes.tolist(), found.labels.total_variation.tolist()
    ([4, 4], [0.5, 0.5])
    """
    title = title_of(data)
    sizes = {
        split: {cid: num_samples(data.client_dataset(cid, split), split) for cid in data.split_ids(split)}
        for split in SPLITS
        if data.has_split(split)
    }
    clients = list(dict.fromkeys([*data.client_ids, *(cid for held in sizes.values() for cid in held)]))
    samples = {split: np.array([held.get(cid, 0) for cid in clients]) for split, held in sizes.items()}
    try:
        labels = _count(data)
    except ValueError as error:
        return Survey(title, clients, samples, note=str(error))
    return Survey(title, clients, samples, labels)


def title_of(data: FederatedDataModule) -> str:
    """The description of a datamodule, such as that its data are generated; else the name of its class."""
    return str(getattr(data, "description", None) or type(data).__name__)


def class_name(data: FederatedDataModule, label: Any) -> Any:
    """The name of a class, such as the character of class 36, if the datamodule has ``class_names``; else its label."""
    whole = isinstance(label, int) or (isinstance(label, float) and label.is_integer())
    return data.class_names[int(label)] if whole and 0 <= label < len(data.class_names) else label


def _count(data: FederatedDataModule) -> Labels:
    known: dict[int, NDArray[Any]] = {}
    held = [_read(data.client_dataset(cid), known) for cid in data.client_ids]
    pool = np.concatenate(held)
    if np.issubdtype(pool.dtype, np.floating) and not np.array_equal(pool, np.rint(pool)):
        raise ValueError("The targets are real numbers (regression): there are no classes to compare.")
    names, label = np.unique(pool, return_inverse=True)
    owner = np.repeat(np.arange(len(held)), [len(labels) for labels in held])
    cells = np.bincount(owner * len(names) + label, minlength=len(held) * len(names))
    return Labels([class_name(data, name) for name in names.tolist()], cells.reshape(len(held), len(names)))


def _read(dataset: Dataset[Any], known: dict[int, NDArray[Any]]) -> NDArray[Any]:
    """As ``labels_of``, but read a dataset of which many clients have a subset once, not once per client."""
    if type(dataset) is not Subset:
        return labels_of(dataset)
    whole = dataset.dataset
    if id(whole) not in known:
        known[id(whole)] = _read(whole, known)
    return known[id(whole)][np.asarray(dataset.indices, dtype=np.int64)]


def table(found: Survey) -> list[list[str]]:
    """A header, then one row per client: its samples in every split, its classes, its distances to the pool."""
    columns: dict[str, Iterable[object]] = {"client": map(label_of, found.clients), **found.samples}
    if (labels := found.labels) is not None:
        columns["classes"] = labels.classes
        columns["total_variation"] = (f"{d:.4f}" for d in labels.total_variation)
        columns["jensen_shannon"] = (f"{d:.4f}" for d in labels.jensen_shannon)
    rows = zip_longest(*columns.values(), fillvalue="")  # clients without training data have no labels
    return [list(columns), *([str(cell) for cell in row] for row in rows)]


def describe(found: Survey, extremes: int = 5) -> str:
    """The report: the federation, its sizes, its labels, its largest and smallest clients."""
    counted = {"clients": found.clients_per_split, "samples": found.samples_per_split}
    totals = [[name, *(f"{n:,}" for n in by_split.values())] for name, by_split in counted.items()]
    parts = [found.title, *_aligned([["", *found.samples], *totals]), ""]
    parts += ["Training samples per client", *_pairs(_of_sizes(found)), ""]
    parts += [f"Labels: {found.note}"] if found.labels is None else ["Labels", *_pairs(_of_labels(found.labels))]
    header, *rows = table(found)
    rows = [rows[i] for i in found.by_size]
    groups = {f"The {extremes} largest clients": rows[:extremes], f"The {extremes} smallest": rows[-extremes:]}
    for heading, some in (groups if len(rows) > 2 * extremes else {"Clients by size": rows}).items():
        parts += ["", heading, *_aligned([header, *some])]
    return "\n".join(parts)


def _of_sizes(found: Survey) -> dict[str, str]:
    return {
        "min, median, max": _range(found.sizes),
        "mean": f"{found.sizes.mean():,.1f}",
        "the largest client holds": f"{found.largest_share:.1%}",
        "Gini coefficient": f"{found.gini:.3f} (0: all clients are equally large)",
    }


def _of_labels(labels: Labels) -> dict[str, str]:
    return {
        "classes": f"{len(labels.names):,}",
        "per client: min, median, max": _range(labels.classes),
        "effective, median": f"{np.median(labels.effective_classes):.2f} (exp of the entropy)",
        "total variation, mean": f"{labels.total_variation.mean():.3f} (client to pool; 0: alike, 1: disjoint)",
        "Jensen-Shannon, mean": f"{labels.jensen_shannon.mean():.3f} (the same in bits)",
    }


def _range(n: Counts) -> str:
    return f"{n.min():,}, {np.median(n):,.10g}, {n.max():,}"


def _pairs(values: Mapping[str, str]) -> list[str]:
    return [f"  {name:<32}{value}" for name, value in values.items()]


def _aligned(rows: list[list[str]]) -> list[str]:
    """The first column to the left, numbers to the right."""
    first, *widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(["", row[0].ljust(first), *(c.rjust(w) for c, w in zip(row[1:], widths, strict=True))])
        for row in rows
    ]
