"""What the clients of a federation hold, and how much they differ: numbers, a report, and pictures.

With :math:`p_i` the label distribution of client i and :math:`p` that of all training data together, clients are
compared by the total variation and the Jensen-Shannon divergence between :math:`p_i` and :math:`p`. Both lie in [0, 1]
and are 0 for a client that is like the pool; their means weigh all clients equally, whatever their sizes.
"""

from __future__ import annotations

import math
import textwrap
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_fed.data import SPLITS, FederatedDataModule
from lightning_fed.partition import labels_of, num_samples
from lightning_fed.store import ClientId

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

Counts = NDArray[np.int64]
Reals = NDArray[np.float64]

#: clients that the heat map shows; of more, evenly spread ones
MAX_ROWS = 100

#: width and height of an image within its cell of the contact sheet
TILE = (0.9, 0.72)


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
    """Who holds how much of what.

    Args:
        title: what the data are: the datamodule's ``description``, else its class.
        clients: all clients, those who train first; arrays have one row per client, in this order.
        samples: for every split the number of samples of each client, 0 where it has none.
        labels: of those who train; None where there are no classes.
        note: why there are none.
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
    """What a datamodule says of itself, such as that its data are generated; else the name of its class."""
    return str(getattr(data, "description", None) or type(data).__name__)


def _count(data: FederatedDataModule) -> Labels:
    known: dict[int, NDArray[Any]] = {}
    held = [_read(data.client_dataset(cid), known) for cid in data.client_ids]
    pool = np.concatenate(held)
    if np.issubdtype(pool.dtype, np.floating) and not np.array_equal(pool, np.rint(pool)):
        raise ValueError("The targets are real numbers (regression): there are no classes to compare.")
    names, label = np.unique(pool, return_inverse=True)
    owner = np.repeat(np.arange(len(held)), [len(labels) for labels in held])
    cells = np.bincount(owner * len(names) + label, minlength=len(held) * len(names))
    return Labels(names.tolist(), cells.reshape(len(held), len(names)))


def _read(dataset: Dataset[Any], known: dict[int, NDArray[Any]]) -> NDArray[Any]:
    """``labels_of``, but a dataset of which many clients have a subset is read once, not once per client."""
    if type(dataset) is not Subset:
        return labels_of(dataset)
    whole = dataset.dataset
    if id(whole) not in known:
        known[id(whole)] = _read(whole, known)
    return known[id(whole)][np.asarray(dataset.indices, dtype=np.int64)]


def table(found: Survey) -> list[list[str]]:
    """A header, then one row per client: its samples in every split, its classes, its distances to the pool."""
    columns: dict[str, Iterable[object]] = {"client": found.clients, **found.samples}
    if (labels := found.labels) is not None:
        columns["classes"] = labels.classes
        columns["total_variation"] = (f"{d:.4f}" for d in labels.total_variation)
        columns["jensen_shannon"] = (f"{d:.4f}" for d in labels.jensen_shannon)
    rows = zip_longest(*columns.values(), fillvalue="")  # those who do not train have no labels
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


def histograms(found: Survey) -> Figure:
    """Samples per client, classes per client, and who has which label; the first alone where there are no classes."""
    from matplotlib.figure import Figure

    labels = found.labels
    figure = Figure(figsize=(5, 4) if labels is None else (15, 4.5), layout="constrained")
    figure.suptitle(textwrap.fill(found.title, 60 if labels is None else 150))
    panels = figure.subplots(1, 1 if labels is None else 3, squeeze=False)[0]
    _draw_sizes(panels[0], found.sizes)
    if labels is not None:
        _draw_classes(panels[1], labels)
        _draw_shares(panels[2], labels, found.by_size)
    return figure


def _draw_sizes(axes: Axes, sizes: Counts) -> None:
    low, median, high = int(sizes.min()), float(np.median(sizes)), int(sizes.max())
    bins = np.linspace(low - 0.5, high + 0.5, min(25, high - low + 1) + 1)
    if high > 10 * median:  # a few large clients would squeeze all others into one bar
        bins = np.geomspace(low, high + 1, 26)
        axes.set_xscale("log")
        axes.xaxis.set_major_formatter("{x:,.0f}")
        axes.xaxis.set_minor_formatter("")
    axes.hist(sizes, bins=bins.tolist(), color="tab:blue", edgecolor="white", linewidth=0.5)
    axes.axvline(median, color="black", linestyle="--", linewidth=1)
    axes.set(xlabel="training samples", ylabel="clients", title=f"Samples per client (median {median:,.10g})")
    _finish(axes)


def _draw_classes(axes: Axes, labels: Labels) -> None:
    axes.bar(*np.unique(labels.classes, return_counts=True), color="tab:orange", width=0.9)
    axes.set(xlim=(0.4, len(labels.names) + 0.6), xlabel="different labels", ylabel="clients")
    axes.set_title(f"Classes per client (of {len(labels.names)})")
    _finish(axes)


def _draw_shares(axes: Axes, labels: Labels, order: Counts) -> None:
    shown = order[_spread(len(order), MAX_ROWS)]
    image = axes.imshow(labels.p_i[shown], aspect="auto", cmap="Blues", vmin=0, interpolation="nearest")
    some = f"{len(shown)} of {len(order)} clients" if len(shown) < len(order) else "clients"
    step = math.ceil(len(labels.names) / 20)
    axes.set_xticks(range(0, len(labels.names), step), [str(name) for name in labels.names[::step]])
    axes.set(xlabel="label", ylabel=f"{some}, largest first", yticks=[], title="Label distribution")
    axes.figure.colorbar(image, ax=axes, label="share of the client's samples")


def _finish(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    for axis in (axes.xaxis, axes.yaxis):
        if axis.get_scale() == "linear":
            axis.set_major_locator(MaxNLocator("auto", steps=[1, 2, 5, 10], integer=True))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def contact_sheet(data: FederatedDataModule, clients: int = 10, per_client: int = 20) -> Figure | None:
    """Some training samples with their labels, one row per client; None if the samples are no images.

    Clients, and the samples of each, are spread evenly over all there are, in their order.
    """
    from matplotlib.figure import Figure

    names = [data.client_ids[i] for i in _spread(len(data.client_ids), clients)]
    held: list[Any] = [data.client_dataset(cid) for cid in names]
    samples = [[dataset[i] for i in _spread(len(dataset), per_client)] for dataset in held]
    images = [[image for sample in row if (image := as_image(sample)) is not None] for row in samples]
    if list(map(len, images)) != list(map(len, samples)):
        return None
    columns, (height, width) = max(map(len, samples)), images[0][0].shape[:2]
    tall = TILE[0] / TILE[1] * height / width  # of a cell, against its width
    figure = Figure(figsize=(1.2 + 0.5 * columns, 0.5 + 0.5 * tall * len(names)), layout="constrained")
    figure.suptitle(textwrap.fill(title_of(data), 5 * columns + 20), fontsize=11)
    axes = figure.subplots()
    _draw_tiles(axes, images, [[_label(sample) for sample in row] for row in samples])
    axes.set(xlim=(0, columns), ylim=(len(names), 0), aspect=tall, xticks=[])
    axes.set_yticks([i + 0.6 for i in range(len(names))], [str(cid)[:24] for cid in names], fontsize=8)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    return figure


def _draw_tiles(axes: Axes, images: list[list[Tensor]], labels: list[list[str]]) -> None:
    """Image j of row i lies in the unit square at (j, i), below its label; all share one scale of grey."""
    low = min(float(image.min()) for row in images for image in row)
    high = max(float(image.max()) for row in images for image in row)
    for i, row in enumerate(images):
        for j, image in enumerate(row):
            pixels = ((image - low) / max(high - low, 1e-12)).numpy()
            extent = (j + (1 - TILE[0]) / 2, j + (1 + TILE[0]) / 2, i + 0.97, i + 0.97 - TILE[1])
            axes.imshow(pixels, cmap="gray", vmin=0, vmax=1, extent=extent)
            axes.text(j + 0.5, i + 0.13, labels[i][j], ha="center", va="center", fontsize=7)


def as_image(sample: Any) -> Tensor | None:
    """The first tensor of a sample as (H, W) or (H, W, 3), if it looks like an image of at least 8 x 8 pixels.

    That is (H, H), (1, H, W), (3, H, W), or a flat square such as 784 = 28 x 28, of floats or bytes.

    >>> as_image((torch.zeros(784), 3)).shape, as_image((torch.zeros(60), 3))
    (torch.Size([28, 28]), None)
    """
    tensors = [entry.detach().cpu() for entry in _entries(sample) if isinstance(entry, Tensor)]
    x = tensors[0] if tensors else torch.empty(0)
    if x.ndim == 1 and math.isqrt(len(x)) ** 2 == len(x):
        x = x.reshape(math.isqrt(len(x)), math.isqrt(len(x)))
    elif x.ndim == 3 and len(x) in (1, 3):
        x = x[0] if len(x) == 1 else x.permute(1, 2, 0)
    elif x.ndim != 2 or x.shape[0] != x.shape[1]:
        return None
    pixels = x.is_floating_point() or x.dtype == torch.uint8  # other integers are tokens
    return x.float() if pixels and min(x.shape[:2]) >= 8 else None


def _entries(sample: Any) -> list[Any]:
    return list(
        sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (tuple, list)) else [sample]
    )


def _label(sample: Any) -> str:
    label = sample.get("label") if isinstance(sample, Mapping) else (None, *_entries(sample)[1:])[-1]
    if isinstance(label, Tensor):
        label = label.item() if label.numel() == 1 else None
    return "" if label is None else f"{label:.3g}" if isinstance(label, float) else str(label)


def _spread(n: int, wanted: int) -> list[int]:
    """So many of 0, ..., n - 1, evenly spread."""
    return [round(i) for i in np.linspace(0, n - 1, min(n, wanted))]
