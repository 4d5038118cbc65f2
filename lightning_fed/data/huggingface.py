"""Hugging Face's ``Dataset`` and ``DatasetDict`` as data of clients and of the server."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lightning_fed.core.memory import ClientId
from lightning_fed.data.columns import is_huggingface
from lightning_fed.data.partition import ByKey, Partition, Rule, as_partitioner
from lightning_fed.data.partition.flower import is_flower

#: The splits of a ``DatasetDict`` that are used, by what they are called there.
NAMES = {"train": "train", "validation": "val", "valid": "val", "val": "val", "dev": "val", "test": "test"}
#: Who holds evaluation data that belong to no client.
SERVER = "server"


def deal(splits: Mapping[str, Any], by: str | Rule, label: str | None) -> dict[str, dict[ClientId, Sequence[int]]]:
    """Whose each sample is: by split, then by client.

    Evaluation data are dealt by the column that ``by`` names, if they have it; otherwise they are the server's.
    """
    dealt: dict[str, dict[ClientId, Sequence[int]]] = {
        split: {SERVER: range(len(part))} for split, part in splits.items()
    }
    if isinstance(by, str):
        held = {split: part for split, part in splits.items() if split == "train" or by in part.column_names}
        return dealt | {split: {**ByKey(by)(part)} for split, part in held.items()}
    if not (callable(by) or is_flower(by)) or isinstance(by, type):
        raise TypeError(
            f"by must be the name of a column or a partitioner such as Dirichlet(10, alpha=0.5), got {by!r}."
        )
    train = with_label(splits["train"], label) if isinstance(by, Partition) else splits["train"]
    return dealt | {"train": {**as_partitioner(by)(train)}}


def with_label(dataset: Any, label: str | None) -> Any:
    """The dataset with ``label`` as the column that partitioners read."""
    if label is None or label == "label":
        return dataset
    if label not in dataset.column_names:
        raise ValueError(f"label={label!r} names no column. The dataset has {', '.join(dataset.column_names)}.")
    others = dataset.remove_columns("label") if "label" in dataset.column_names else dataset
    return others.rename_column(label, "label")


def splits_of(dataset: object) -> dict[str, Any]:
    """The datasets for ``"train"``, ``"val"`` and ``"test"``; refuse objects that cannot be dealt to clients."""
    if is_huggingface(dataset, "IterableDataset") or is_huggingface(dataset, "IterableDatasetDict"):
        raise TypeError(
            "from_huggingface got a streaming dataset, whose samples come in one order only: clients need to reach "
            "their own samples again and again. Load it with streaming=False, or keep a part of it: "
            "Dataset.from_list(list(stream.take(10_000)))."
        )
    if is_huggingface(dataset):
        return {"train": dataset}
    if not (isinstance(dataset, Mapping) and dataset and all(map(is_huggingface, dataset.values()))):
        raise TypeError(
            f"from_huggingface takes a datasets.Dataset or a datasets.DatasetDict, got {type(dataset).__name__}. "
            "FederatedDataModule.from_dataset takes any other dataset."
        )
    found: dict[str, Any] = {}
    for name, part in dataset.items():
        if (split := NAMES.get(str(name))) in found:
            raise ValueError(f"There are two splits for {split}: {', '.join(map(str, dataset))}. Leave one out.")
        if split is not None:
            found[split] = part
    if "train" not in found:
        raise ValueError(f"The DatasetDict has no split 'train'. It has {', '.join(map(str, dataset))}.")
    return found


def formatted(dataset: Any, columns: Sequence[str] | None, collates: bool) -> Any:
    """The dataset as training sees it: the chosen columns, as tensors.

    A format or transform of the dataset's own stays, and a ``collate_fn`` gets samples as they are. In other cases
    samples become tensors, since torch's default collation would transpose lists of numbers.
    """
    if isinstance(columns, str):
        raise TypeError(f"columns must be a list of names such as [{columns!r}], got {columns!r}.")
    if columns is not None:
        unknown = [name for name in columns if name not in dataset.column_names]
        if unknown or not columns:
            raise ValueError(f"columns={list(columns)!r}, but the dataset has {', '.join(dataset.column_names)}.")
        dataset = dataset.select_columns(list(columns))
    return dataset if collates or dataset.format["type"] is not None else dataset.with_format("torch")
