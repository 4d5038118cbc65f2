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


@dataclass(frozen=True)
class Labels:
    """How often every client has every label: ``counts`` has one row per client, one column per entry of ``names``."""

    names: list[Any]
    counts: Counts = field(repr=False)

    @property
    def p_i(self) -> Reals:
        return self.counts / self.counts.sum(axis=1, keepdims=True)

    @property
    def p(self) -> Reals:
        return self.counts.sum(axis=0) / self.counts.sum()

    @property
    def classes(self) -> Counts:
        """Number of different labels that each client has."""
        return (self.counts > 0).sum(axis=1)

    @property
    def effective_classes(self) -> Reals:
        r""":math:`\exp(-\sum_c p_{ic} \ln p_{ic})` of each client: k if it has k labels equally often."""
        return 2 ** _entropy(self.p_i)

    @property
    def total_variation(self) -> Reals:
        r""":math:`\frac12 \sum_c |p_{ic} - p_c|` of each client."""
        return 0.5 * np.abs(self.p_i - self.p).sum(axis=1).clip(0, 2)

    @property
    def jensen_shannon(self) -> Reals:
        r""":math:`H(\frac{p_i + p}2) - \frac{H(p_i) + H(p)}2` of each client, with the entropy H in bits."""
        mixed = _entropy((self.p_i + self.p) / 2)
        return (mixed - (_entropy(self.p_i) + _entropy(self.p)) / 2).clip(0, 1)  # rounding may leave -1e-17


def _entropy(p: Reals) -> Reals:
    return -(p * np.log2(np.where(p > 0, p, 1.0))).sum(axis=-1)


@dataclass(frozen=True)
class Survey:
    """Who holds how much of what.

    Args:
        title: what the data are: the datamodule's ``description``, else its class.
        clients: all clients; arrays have one row per client, in this order.
        samples: for every split the number of samples of each client, 0 where it has none.
        labels: of the training data; None where there are no classes.
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
        """Training samples of each client."""
        return self.samples["train"]

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
    title, clients = title_of(data), data.client_ids
    samples = {
        split: np.array([_size(data, cid, split) for cid in clients]) for split in SPLITS if data.has_split(split)
    }
    try:
        labels = _count(data, clients)
    except ValueError as error:
        return Survey(title, clients, samples, note=str(error))
    return Survey(title, clients, samples, labels)


def title_of(data: FederatedDataModule) -> str:
    """What a datamodule says of itself, such as that its data are generated; else the name of its class."""
    return str(getattr(data, "description", None) or type(data).__name__)


def _size(data: FederatedDataModule, cid: ClientId, split: str) -> int:
    held = data.splits[split].get(cid)
    return 0 if held is None else num_samples(held, f"{split} data of client {cid!r}")


def _count(data: FederatedDataModule, clients: list[ClientId]) -> Labels:
    known: dict[int, NDArray[Any]] = {}
    held = [_read(data.client_dataset(cid), known) for cid in clients]
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
    if found.labels is not None:
        columns["classes"] = found.labels.classes
        columns["total_variation"] = (f"{d:.4f}" for d in found.labels.total_variation)
        columns["jensen_shannon"] = (f"{d:.4f}" for d in found.labels.jensen_shannon)
    return [list(columns), *([str(cell) for cell in row] for row in zip(*columns.values(), strict=True))]


def describe(found: Survey, extremes: int = 5) -> str:
    """The report: the federation, its sizes, its labels, its largest and smallest clients."""
    totals = [["", *found.samples], ["clients", *_figures(found.clients_per_split)]]
    totals += [["samples", *_figures(found.samples_per_split)]]
    parts = [found.title, *_aligned(totals), "", "Training samples per client", *_pairs(_of_sizes(found)), ""]
    parts += [f"Labels: {found.note}"] if found.labels is None else ["Labels", *_pairs(_of_labels(found.labels))]
    header, *rows = table(found)
    rows = [rows[i] for i in found.by_size]
    groups = {f"The {extremes} largest clients": rows[:extremes], f"The {extremes} smallest": rows[-extremes:]}
    for heading, some in groups.items() if len(rows) > 2 * extremes else [("Clients by size", rows)]:
        parts += ["", heading, *_aligned([header, *some])]
    return "\n".join(parts)


def _of_sizes(found: Survey) -> dict[str, str]:
    return {
        "min, median, mean, max": _range(found.sizes, mean=True),
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


def _range(n: Counts, mean: bool = False) -> str:
    middle = [f"{np.median(n):,.10g}", *([f"{n.mean():,.1f}"] if mean else [])]
    return ", ".join([f"{n.min():,}", *middle, f"{n.max():,}"])


def _figures(values: Mapping[str, int]) -> list[str]:
    return [f"{value:,}" for value in values.values()]


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
    low, high = int(sizes.min()), int(sizes.max())
    wide = high > 20 * low  # a few large clients would squeeze all others into one bar
    bins = np.geomspace(low, high + 1, 25) if wide else np.linspace(low - 0.5, high + 0.5, min(25, high - low + 1) + 1)
    axes.hist(sizes, bins=bins, color="tab:blue", edgecolor="white", linewidth=0.5)
    axes.axvline(np.median(sizes), color="black", linestyle="--", linewidth=1, label=f"median {np.median(sizes):g}")
    axes.set(
        xscale="log" if wide else "linear", xlabel="training samples", ylabel="clients", title="Samples per client"
    )
    _finish(axes)
    axes.legend(frameon=False)


def _draw_classes(axes: Axes, labels: Labels) -> None:
    axes.bar(*np.unique(labels.classes, return_counts=True), color="tab:orange", width=0.9)
    axes.set(
        xlim=(0.4, len(labels.names) + 0.6), xlabel="different labels", ylabel="clients", title="Classes per client"
    )
    axes.xaxis.get_major_locator().set_params(integer=True)
    _finish(axes)


def _draw_shares(axes: Axes, labels: Labels, order: Counts) -> None:
    shown = order[_spread(len(order), MAX_ROWS)]
    image = axes.imshow(labels.p_i[shown], aspect="auto", cmap="magma_r", vmin=0, interpolation="nearest")
    some = f"{len(shown)} of {len(order)} clients" if len(shown) < len(order) else "clients"
    step = math.ceil(len(labels.names) / 20)
    axes.set_xticks(range(0, len(labels.names), step), [str(name) for name in labels.names[::step]])
    axes.set(xlabel="label", ylabel=f"{some}, largest first", yticks=[], title="Label distribution")
    axes.figure.colorbar(image, ax=axes, label="share of the client's samples")


def _finish(axes: Axes) -> None:
    axes.yaxis.get_major_locator().set_params(integer=True)
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def contact_sheet(data: FederatedDataModule, clients: int = 10, per_client: int = 20) -> Figure | None:
    """Some training samples with their labels, one row per client; None if the samples are no images.

    Clients, and the samples of each, are spread evenly over all there are, in their order.
    """
    from matplotlib.figure import Figure

    if as_image(data.client_dataset(data.client_ids[0])[0]) is None:
        return None
    names = [data.client_ids[i] for i in _spread(len(data.client_ids), clients)]
    figure = Figure(figsize=(1.2 + 0.5 * per_client, 0.7 + 0.66 * len(names)), layout="constrained")
    figure.suptitle(textwrap.fill(title_of(data), 20 + 6 * per_client))
    rows = figure.subplots(len(names), per_client, squeeze=False)
    for cid, row in zip(names, rows, strict=True):
        _draw_row(row, data.client_dataset(cid), str(cid))
    return figure


def _draw_row(row: NDArray[Any], dataset: Any, name: str) -> None:
    samples = [dataset[i] for i in _spread(len(dataset), len(row))]
    images = [as_image(sample) for sample in samples]
    values = torch.cat([image.flatten() for image in images if image is not None])
    low, high = values.min(), values.max()
    row[0].set_ylabel(name, rotation=0, ha="right", va="center", fontsize=8)
    for axes in row:
        axes.set(xticks=[], yticks=[])
        axes.spines[:].set_visible(False)
    for axes, image, sample in zip(row, images, samples, strict=False):
        if image is not None:
            axes.imshow((image - low) / (high - low).clamp(min=1e-12), cmap="gray", vmin=0, vmax=1)
            axes.set_title(_label(sample), fontsize=7, pad=1.5)


def as_image(sample: Any) -> Tensor | None:
    """The first tensor of a sample as (H, W) or (H, W, 3), if it looks like an image of at least 8 x 8 pixels.

    That is (H, H), (1, H, W), (3, H, W), or a flat square such as 784 = 28 x 28, of floats or bytes.

    >>> as_image((torch.zeros(784), 3)).shape, as_image((torch.zeros(60), 3))
    (torch.Size([28, 28]), None)
    """
    entries = (
        sample.values() if isinstance(sample, Mapping) else sample if isinstance(sample, (tuple, list)) else [sample]
    )
    x = next((entry.detach().cpu() for entry in entries if isinstance(entry, Tensor)), torch.empty(0))
    if x.ndim == 1 and math.isqrt(len(x)) ** 2 == len(x):
        x = x.reshape(math.isqrt(len(x)), -1)
    elif x.ndim == 3 and len(x) in (1, 3):
        x = x[0] if len(x) == 1 else x.permute(1, 2, 0)
    elif x.ndim != 2 or x.shape[0] != x.shape[1]:
        return None
    pixels = x.is_floating_point() or x.dtype == torch.uint8  # other integers are tokens
    return x.float() if pixels and min(x.shape[:2]) >= 8 else None


def _label(sample: Any) -> str:
    last = (
        sample.get("label", "")
        if isinstance(sample, Mapping)
        else sample[-1]
        if isinstance(sample, (tuple, list))
        else ""
    )
    if isinstance(last, Tensor):
        last = last.item() if last.numel() == 1 else ""
    return f"{last:.3g}" if isinstance(last, float) else str(last)


def _spread(n: int, wanted: int) -> list[int]:
    """So many of 0, ..., n - 1, evenly spread."""
    return np.linspace(0, n - 1, min(n, wanted)).round().astype(int).tolist()
