"""Partitioners deal the samples of one dataset to clients.

A partitioner is a frozen rule; called with a map-style dataset it returns the indices of every client's samples. The
draw is a function of ``seed`` and the dataset alone. Rules about labels read the last tensor of a ``TensorDataset``, a
column of a ``datasets.Dataset``, what a data set of torchvision stores, ``dataset.targets``, or else every sample once:
its last entry, or its ``"label"``.

:func:`as_partitioner` makes a partitioner of any function that deals samples.
"""

from lightning_fed.data.partition.base import (
    IID,
    ByKey,
    Dirichlet,
    Partition,
    Shards,
    Sizes,
    check_dealt,
    hold_out,
    labels_of,
    num_samples,
)
from lightning_fed.data.partition.by_classes import Pathological
from lightning_fed.data.partition.by_feature import Continuous
from lightning_fed.data.partition.functions import Rule, as_partitioner, deal_samples

__all__ = [
    "IID",
    "ByKey",
    "Continuous",
    "Dirichlet",
    "Partition",
    "Pathological",
    "Rule",
    "Shards",
    "Sizes",
    "as_partitioner",
    "check_dealt",
    "deal_samples",
    "hold_out",
    "labels_of",
    "num_samples",
]
