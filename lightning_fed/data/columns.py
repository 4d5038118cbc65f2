"""Columns of a ``datasets.Dataset`` of Hugging Face: read for all samples at once, without decoding a sample.

``datasets`` is not imported here: a caller that holds one of its objects has imported it.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray


def is_huggingface(dataset: object, kind: str = "Dataset") -> bool:
    """Whether an object is a ``datasets.Dataset``, or another class of that package."""
    found = getattr(sys.modules.get("datasets"), kind, None)
    return isinstance(found, type) and isinstance(dataset, found)


def column(dataset: Any, name: str, rows: Sequence[int] | None = None) -> list[Any]:
    """One column of a ``datasets.Dataset`` as stored, in the order of the dataset: all of it, or some rows.

    Other columns are not touched, so that no image is decoded and no text copied.
    """
    if name not in dataset.column_names:
        raise ValueError(f"The dataset has no column {name!r}. It has {', '.join(dataset.column_names)}.")
    stored = dataset.select_columns(name).with_format("arrow")
    values: list[Any] = stored[slice(None) if rows is None else list(rows)][name].to_pylist()
    if None in values:
        row = values.index(None)
        where = row if rows is None else rows[row]
        raise ValueError(
            f"Column {name!r} has no value in row {where} ({values.count(None)} such rows). Leave these rows out: "
            f"dataset.filter(lambda value: value is not None, input_columns={name!r})."
        )
    return values


def column_labels(dataset: Any, rows: Sequence[int] | None = None) -> NDArray[Any]:
    """One label per sample: the column ``"label"``, else ``"labels"``, else the only ``ClassLabel``."""
    return np.asarray(column(dataset, _label_column(dataset), rows))


def class_names(dataset: Any, label: str | None) -> tuple[str, ...]:
    """The names of the classes 0, 1, ... if the label is a ``ClassLabel``."""
    if label is None:
        try:
            label = _label_column(dataset)
        except ValueError:
            return ()
    return tuple(getattr(dataset.features.get(label), "names", None) or ())


def _label_column(dataset: Any) -> str:
    for name in ("label", "labels"):
        if name in dataset.column_names:
            return name
    classes = [str(name) for name, feature in dataset.features.items() if type(feature).__name__ == "ClassLabel"]
    if len(classes) != 1:
        raise ValueError(
            f"Which column is the label? The dataset has {', '.join(dataset.column_names)}. Give its name, as label=."
        )
    return classes[0]
