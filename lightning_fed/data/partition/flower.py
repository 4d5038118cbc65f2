"""Partitioners of flwr-datasets, as ours."""

from __future__ import annotations

import copy
import importlib
from dataclasses import dataclass
from typing import Any

from torch.utils.data import Dataset

from lightning_fed.core.memory import ClientId
from lightning_fed.data.columns import is_huggingface
from lightning_fed.data.partition.base import Partition, as_client_id, labels_of

#: The column in which a partitioner finds the row of a sample.
ROW = "row of the sample"


def is_flower(partition: object) -> bool:
    """Whether an object is a partitioner of flwr-datasets, or of a class that inherits from one."""
    return any(kind.__module__.startswith("flwr_datasets.") for kind in type(partition).__mro__)


@dataclass(frozen=True)
class Flower(Partition):
    """The partition that a partitioner of flwr-datasets makes of the columns with numbers and words.

    Its clients are 0, 1, 2, ...; those of a natural partition have the names that they have there.
    """

    partitioner: Any

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        name = type(self.partitioner).__name__
        if name.startswith("Vertical"):
            raise ValueError(f"{name} deals columns, and clients need samples of their own. Use another partitioner.")
        own = copy.deepcopy(self.partitioner)  # which takes one dataset in its life
        own.dataset = _columns(dataset)
        seen = [column for column in own.dataset.column_names if column != ROW]
        try:
            return self._dealt(own)
        except (KeyError, ValueError) as error:
            raise ValueError(f"{name} of flwr-datasets, which sees the columns {', '.join(seen)}: {error}") from error

    def _dealt(self, own: Any) -> dict[ClientId, list[int]]:
        names = getattr(own, "partition_id_to_natural_id", None)
        dealt: dict[ClientId, list[int]] = {}
        for i in range(own.num_partitions):
            rows = own.load_partition(i).with_format(None)[ROW]
            names = getattr(own, "partition_id_to_natural_id", names)
            dealt[as_client_id(names[i], "A natural id") if names else i] = sorted(map(int, rows))
        return dealt


def _columns(dataset: Any) -> Any:
    """A ``datasets.Dataset`` without images and sounds, whose rows know their places; of other datasets the label."""
    datasets: Any = importlib.import_module("datasets")
    if not is_huggingface(dataset):
        labels = labels_of(dataset)
        return datasets.Dataset.from_dict({"label": labels, ROW: range(len(labels))})
    light = [name for name, kind in dataset.features.items() if isinstance(kind, datasets.Value | datasets.ClassLabel)]
    return dataset.select_columns(light).with_format(None).add_column(ROW, list(range(len(dataset))))
