"""Labels of torchvision's data sets, where these keep them: no image is decoded to know its class."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

#: Attributes in which data sets of torchvision keep one label per sample, or pairs that end with it.
PLACES = ("targets", "labels", "_labels", "y", "samples", "_samples")


def is_torchvision(dataset: object) -> bool:
    """Whether a dataset is of a class of torchvision, or of one that inherits from such a class."""
    return any(kind.__module__.startswith("torchvision.datasets") for kind in type(dataset).__mro__)


def stored_labels(dataset: Any) -> NDArray[Any] | None:
    """One label per sample, as the dataset stores them; None if it does not, or stores something else.

    One sample is read: its label tells whether the stored numbers are the labels.
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
    first = dataset[0]
    own = first[-1] if isinstance(first, tuple | list) else None
    return np.isscalar(own) and own == labels[0] if not isinstance(own, torch.Tensor) else own.tolist() == labels[0]
