"""Pictures of the clients' data."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.core.labels import label_of
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.survey import Counts, Labels, Survey, class_name, title_of

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

#: Largest number of clients in the heat map; of more clients, evenly spread ones are shown.
MAX_ROWS = 100

#: Longest name of a class on the contact sheet, in characters.
MAX_NAME = 8

#: width and height of an image within its cell of the contact sheet
TILE = (0.9, 0.72)


def histograms(found: Survey) -> Figure:
    """Samples per client; if there are classes, also classes per client and labels by client."""
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
    axes.set_xticks(range(0, len(labels.names), step), [str(name) for name in labels.names[::step]], parse_math=False)
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
    """Some training samples with their labels, one row per client; None if the samples are not images.

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
    _draw_tiles(axes, images, [[_label(sample, data) for sample in row] for row in samples])
    axes.set(xlim=(0, columns), ylim=(len(names), 0), aspect=tall, xticks=[])
    axes.set_yticks(
        [i + 0.6 for i in range(len(names))], [label_of(cid)[:24] for cid in names], fontsize=8, parse_math=False
    )
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
            axes.text(j + 0.5, i + 0.13, labels[i][j], ha="center", va="center", fontsize=7, parse_math=False)


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


def _label(sample: Any, data: FederatedDataModule) -> str:
    label = sample.get("label") if isinstance(sample, Mapping) else (None, *_entries(sample)[1:])[-1]
    if isinstance(label, Tensor):
        label = label.item() if label.numel() == 1 else None
    name = class_name(data, label)
    return "" if name is None else f"{name:.3g}" if isinstance(name, float) else str(name)[:MAX_NAME]


def _spread(n: int, wanted: int) -> list[int]:
    """Evenly spread numbers out of 0, ..., n - 1."""
    return [round(i) for i in np.linspace(0, n - 1, min(n, wanted))]
