"""From the images of a data set to the tensors of a model: once and for all in memory where that is exact."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, Subset

from lightning_fed.data.augmented import Transformed
from lightning_fed.data.partition import labels_of
from lightning_fed.data.tensor_loader import TensorRows, row_by_row

#: Images that take no more bytes are kept in memory.
MOST_BYTES = 2**30

#: Arrange the pixels that a class stores as (samples, channels, height, width).
STORED: dict[str, Callable[[Tensor], Tensor]] = {
    **dict.fromkeys(("MNIST", "FashionMNIST", "KMNIST", "EMNIST", "USPS"), lambda pixels: pixels[:, None]),
    **dict.fromkeys(("CIFAR10", "CIFAR100"), lambda pixels: pixels.permute(0, 3, 1, 2)),
    **dict.fromkeys(("SVHN", "STL10"), lambda pixels: pixels),
}

#: Gives the samples at some positions of a data set, transformed.
View = Callable[[Sequence[int]], Dataset[Any]]


def floats() -> Callable[[Any], Any]:
    """The default transform: pixels in [0, 1] as float32, channels first."""
    from torchvision.transforms import v2

    transform: Callable[[Any], Any] = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
    return transform


@cache
def _kinds() -> tuple[frozenset[type], frozenset[type], frozenset[type]]:
    """Transforms that draw no random numbers: all of them, those by entry, and those that only make tensors."""
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    tensors = {v2.ToImage, v2.PILToTensor, v1.PILToTensor}
    by_entry = {v2.ToDtype, v2.ConvertImageDtype, v2.Normalize, v2.ToPureTensor, v2.Identity}
    by_entry |= {v1.ConvertImageDtype, v1.Normalize, nn.Identity}
    others = {v2.Resize, v2.CenterCrop, v2.Pad, v2.Grayscale, v2.RGB, v2.ToTensor, v2.ToPILImage}
    others |= {v1.Resize, v1.CenterCrop, v1.Pad, v1.Grayscale, v1.ToTensor, v1.ToPILImage}
    return frozenset(tensors | by_entry | others), frozenset(by_entry), frozenset(tensors)


def steps_of(transform: Any) -> list[Any]:
    """The transforms that a transform is composed of."""
    from torchvision import transforms as v1
    from torchvision.transforms import v2

    if type(transform) in (v1.Compose, v2.Compose):
        return [step for part in transform.transforms for step in steps_of(part)]
    if type(transform) is nn.Sequential:
        return [step for part in transform for step in steps_of(part)]
    return [transform]


def maybe_random(transform: Any) -> list[str]:
    """The names of those steps of a transform that draw random numbers, or may: exact types are known, no others.

    >>> from torchvision.transforms import v2
    >>> maybe_random(v2.Compose([v2.RandomHorizontalFlip(), v2.ToImage()]))
    ['RandomHorizontalFlip']
    """
    known = _kinds()[0]
    unknown = [step for step in steps_of(transform) if type(step) not in known]
    return [getattr(step, "__name__", type(step).__name__) for step in unknown]


def view(dataset: Any, transform: Any, in_memory: bool | None, alike: bool = True) -> View:
    """How to read samples of a dataset through a transform without random numbers: from memory if it may be.

    Args:
        in_memory: None decides by size.
        alike: refuse images of unlike shapes, if all are read.
    """
    most = MOST_BYTES if in_memory is None else None
    stored = None if in_memory is False else _stored(dataset, transform, most, alike)
    if stored is None:
        return lambda rows: Transformed(Subset(dataset, rows), transform)
    tensors, of_batch = stored
    return lambda rows: TensorRows(tensors, torch.as_tensor(rows, dtype=torch.int64), of_batch)


def unlike(shapes: Iterable[Sequence[int]]) -> ValueError:
    """The error for images that make no batch."""
    one, other = [tuple(shape) for shape in shapes][:2]
    needed = ["v2.RGB()"] * (one[:-2] != other[:-2]) + ["v2.Resize((64, 64))"] * (one[-2:] != other[-2:])
    return ValueError(
        f"Images have the shapes {one} and {other}, and a batch needs one. Begin transform and eval_transform with"
        f" {' and '.join(needed)}, or give loader_options={{'collate_fn': ...}}."
    )


def _stored(dataset: Any, transform: Any, most: int | None, alike: bool) -> tuple[list[Tensor], Any] | None:
    """Images and labels, and what makes samples of them; None if they are too large or unequal.

    What works by entry (conversions, normalisation) comes last, for batches: bytes take a quarter of the memory.
    """
    steps = steps_of(transform)
    by_entry = _kinds()[1]
    cut = next((i for i in range(len(steps), 0, -1) if type(steps[i - 1]) not in by_entry), 0)
    head, tail = steps[:cut], steps[cut:]
    first = _through(head, dataset[0][0])
    if not isinstance(first, Tensor) or (
        most is not None and first.numel() * first.element_size() * len(dataset) > most
    ):
        return None
    read = _stored_pixels(dataset, head)
    if read is None and (read := _read_pixels(dataset, head, first, alike)) is None:
        return None
    images, labels = read
    of_batch = row_by_row(partial(_samples, steps=tail, kind=type(first)))
    for i in {0, len(dataset) // 2, len(dataset) - 1}:  # bits may depend on the device, or a step on what it is given
        batch = [images[[i]], labels[[i]]]  # copies, since a step may work in place
        if not torch.equal(of_batch(batch)[0][0], _plain(transform(dataset[i][0]))):
            return None
    return [images, labels], of_batch


def _samples(batch: list[Tensor], steps: Sequence[Any], kind: type[Tensor]) -> list[Tensor]:
    images, labels = batch
    return [_plain(_through(steps, images.as_subclass(kind))), labels.long()]


def _plain(image: Any) -> Any:
    return image.as_subclass(Tensor) if isinstance(image, Tensor) else image


def _through(steps: Sequence[Any], image: Any) -> Any:
    for step in steps:
        image = step(image)
    return image


def _stored_pixels(dataset: Any, head: Sequence[Any]) -> tuple[Tensor, Tensor] | None:
    """All images and labels as a class of torchvision stores them, if the first steps only make tensors of them."""
    from torchvision import datasets

    name = type(dataset).__name__
    known = name in STORED and type(dataset) is getattr(datasets, name)  # a class of the user's may give other pixels
    if not known or any(type(step) not in _kinds()[2] for step in head):
        return None
    return STORED[name](torch.as_tensor(dataset.data)).contiguous(), torch.as_tensor(labels_of(dataset))


def _read_pixels(dataset: Any, head: Sequence[Any], first: Tensor, alike: bool) -> tuple[Tensor, Tensor] | None:
    """All images after the first steps, and their labels; None if images are not of one shape and need not be."""
    images = torch.empty((len(dataset), *first.shape), dtype=first.dtype)
    labels = torch.empty(len(dataset), dtype=torch.int64)
    for i in range(len(dataset)):
        sample, label = dataset[i]
        image = _through(head, sample)
        if image.shape != first.shape and alike:
            raise unlike([first.shape, image.shape])
        if image.shape != first.shape or image.dtype != first.dtype:
            return None
        images[i], labels[i] = image, int(label)
    return images, labels
