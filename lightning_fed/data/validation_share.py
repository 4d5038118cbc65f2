"""Hold out a share of every client's training samples, to choose models by."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch.utils.data import Dataset, Subset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.data.augmented import evaluated
from lightning_fed.data.partition import hold_out, num_samples

#: The share that commands hold out where they choose by validation data and the data have none.
VAL_FRACTION = 0.1

Datasets = dict[ClientId, Dataset[Any]]


def hold_out_share(train: Mapping[ClientId, Dataset[Any]], fraction: float) -> tuple[Datasets, Datasets]:
    """Training and validation data by client; a client with a single sample only trains.

    Which samples are held out depends on the client's id, on its number of samples and on ``fraction`` alone.

    >>> left, held = hold_out_share({"ann": list(range(20)), "bob": [7]}, 0.1)
    >>> len(left["ann"]), len(held["ann"]), "bob" in held
    (18, 2, False)
    """
    left: Datasets = {}
    held: Datasets = {}
    for cid, dataset in train.items():
        rows = range(num_samples(dataset, f"train data of client {cid!r}"))
        cut = hold_out(rows, {"val": fraction}, numpy_generator(0, "validation share", cid))
        left[cid] = Subset(dataset, cut["train"]) if "val" in cut else dataset
        if "val" in cut:
            held[cid] = Subset(evaluated(dataset), cut["val"])  # without random changes
    if fraction and not held:
        raise ValueError(f"val_fraction is {fraction}, but no client has a sample to spare: each has a single one.")
    return left, held
