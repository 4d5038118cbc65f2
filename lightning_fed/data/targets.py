"""Labels of torchvision's data sets, where these keep them: no image is decoded to know its class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: Attributes in which data sets of torchvision keep one label per sample, or pairs that end with it.
PLACES = ("targets", "labels", "_labels", "_bin_labels", "y", "samples", "_samples", "_flat_character_images")
#: Number of classes of which the first and the last sample are read, to see whether what is stored are the labels.
CLASSES_READ = 32


def is_torchvision(dataset: object) -> bool:
    """Whether a dataset is of a class of torchvision, or of one that inherits from such a class."""
    return any(kind.__module__.startswith("torchvision.datasets") for kind in type(dataset).__mro__)


def stored_labels(dataset: Any) -> NDArray[Any] | None:
    """One label per sample, as the dataset stores them; None if it does not, or stores something else.

    A few samples are read, some of each class, whose labels tell whether the stored numbers are the labels: an option
    of the data set or a class that inherits from it may have chosen others.
    """
    n = len(dataset)
    for name in PLACES:
        held = getattr(dataset, name, None)
        if held is not None and len(held) == n > 0:
            labels = _labels_in(held)
            if labels is not None and _is_label(dataset, labels := _as_given(dataset, labels)):
                return labels
    return None


def _labels_in(held: Any) -> NDArray[Any] | None:
    if isinstance(held, torch.Tensor):
        held = held.cpu().numpy()
    elif isinstance(held[0], tuple | list):
        held = [entry[-1] for entry in held]
    try:
        found = np.asarray(held)
    except ValueError:  # entries of different lengths
        return None
    return found if found.ndim == 1 and np.issubdtype(found.dtype, np.integer) else None


def _as_given(dataset: Any, labels: NDArray[Any]) -> NDArray[Any]:
    """The labels as samples have them: after the dataset's ``target_transform``."""
    change = getattr(dataset, "target_transform", None)
    return labels if change is None else np.asarray([change(label) for label in labels.tolist()])


def _is_label(dataset: Any, labels: NDArray[Any]) -> bool:
    classes, first = np.unique(labels, return_index=True)
    last = len(labels) - 1 - np.unique(labels[::-1], return_index=True)[1]
    some = slice(None, None, -(-len(classes) // CLASSES_READ))
    return all(_has_label(dataset[i], labels[i]) for i in {*first[some].tolist(), *last[some].tolist()})


def _has_label(sample: Any, label: Any) -> bool:
    own = sample[-1] if isinstance(sample, tuple | list) else None
    return np.isscalar(own) and own == label if not isinstance(own, torch.Tensor) else own.tolist() == label
