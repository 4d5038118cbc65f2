"""The continuous partition: clients differ by a number that every sample has."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import Dataset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import positive, whole
from lightning_fed.data.partition.base import (
    Partition,
    by_position,
    check_entry,
    enough,
    entries_of,
    num_samples,
)


@dataclass(frozen=True)
class Continuous(Partition):
    r"""Samples are sorted by a mixture of a feature and noise, and cut into clients of equal size.

    With :math:`v_j` the feature of sample j, :math:`u_j \in (0, 1)` its rank among all n samples, and
    :math:`e_j \sim U(0, 1)` independent of it, samples are sorted by

    .. math::
        s_j = \lambda u_j + (1 - \lambda) e_j, \qquad
        u_j = \frac{|\{i : v_i < v_j\}| + |\{i : v_i \le v_j\}|}{2 n}

    and client 0 gets the first samples, client 1 the next; sizes differ by one at most. Samples with the same score are
    in random order. Ranks make the partition independent of the unit and of outliers of the feature.

    Args:
        clients: number of clients.
        by: the feature of a sample: an index or a name (``sample[by]``), a function from sample to number, or a
            sequence with one number per sample, in the order of the dataset.
        strength: :math:`\lambda` in [0, 1]; 1 cuts the feature's range into intervals, 0 deals at random.
        seed: of the noise.

    >>> from torch.utils.data import TensorDataset
    >>> Continuous(clients=2, by=0, strength=1.0)(TensorDataset(torch.tensor([0.3, 9.0, 0.1, 0.7])))
    {0: [0, 2], 1: [1, 3]}
    """

    clients: int
    by: int | str | Callable[[Any], float] | Sequence[float]
    strength: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        whole(self, "clients", 1)
        whole(self, "seed")
        positive(self, "strength", "1 sorts by the feature, 0 deals at random.", zero=True, upper=1.0)
        check_entry(self, "by", "number")

    def __call__(self, dataset: Dataset[Any]) -> dict[ClientId, list[int]]:
        n = num_samples(dataset, "the dataset")
        enough(self, n, self.clients, "one sample per client")
        v = self._feature(dataset)
        ordered = np.sort(v)
        u = (np.searchsorted(ordered, v, "left") + np.searchsorted(ordered, v, "right")) / (2 * n)
        e = numpy_generator(self.seed, "Continuous").random(n)
        # lexsort: by the score, the last key; by the noise where scores are equal
        order = np.lexsort((e, self.strength * u + (1 - self.strength) * e))
        return by_position(np.array_split(order, self.clients))

    def _feature(self, dataset: Dataset[Any]) -> NDArray[np.float64]:
        entries = entries_of(dataset, self.by, "Continuous.by", "number")
        values = [entry.tolist() if isinstance(entry, torch.Tensor | np.ndarray) else entry for entry in entries]
        try:
            found = np.asarray(values, dtype=np.float64)
        except (TypeError, ValueError):
            found = np.empty(0)
        if found.shape != (len(values),):
            wrong = next((i for i, value in enumerate(values) if not _is_real(value)), 0)
            raise ValueError(f"Continuous.by must give one number per sample; sample {wrong} has {values[wrong]!r}.")
        if not np.isfinite(found).all():
            wrong = int(np.flatnonzero(~np.isfinite(found))[0])
            raise ValueError(f"Continuous.by must give finite numbers; sample {wrong} has {found[wrong]}.")
        return found


def _is_real(value: Any) -> bool:
    return isinstance(value, int | float | np.number)
