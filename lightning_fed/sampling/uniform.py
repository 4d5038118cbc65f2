"""Samplings that treat all clients alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.validation import whole
from lightning_fed.sampling.base import Sampler, numbers


@dataclass(frozen=True)
class Full(Sampler):
    """Draws all clients in every round. Among online clients: all of them.

    >>> Full().cohort(4, seed=0, round=7)
    [0, 1, 2, 3]
    """

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return np.ones(n)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        return list(range(n))

    @property
    def symmetric(self) -> bool:
        return True

    def among(self, online: Sequence[int], n: int) -> Full:
        return self


@dataclass(frozen=True)
class Uniform(Sampler):
    """Draws ``size`` clients, uniformly without replacement; all online clients if there are fewer.

    >>> Uniform(10).inclusion_probabilities(30)[0]
    np.float64(0.3333333333333333)
    """

    size: int

    def __post_init__(self) -> None:
        whole(self, "size", 1)

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        if self.size > n:
            raise ValueError(f"Cannot draw {self.size} clients per round: the federation has {n}. Use at most {n}.")
        return np.full(n, self.size / n)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        self.inclusion_probabilities(n)
        return sorted(rng.choice(n, size=self.size, replace=False).tolist())

    @property
    def symmetric(self) -> bool:
        return True

    def among(self, online: Sequence[int], n: int) -> Uniform:
        return Uniform(min(self.size, len(online)))


@dataclass(frozen=True)
class DoublyUniform(Sampler):
    r"""First the size j with probability :math:`q_j`, then j clients uniformly; client i has :math:`\sum_j q_j j/n`.

    Among online clients: j, or all if there are fewer.

    Args:
        q: probabilities of the sizes 0 to n, adding up to 1; with ``q[0] > 0`` a round may be empty.

    >>> DoublyUniform([0.25, 0, 0, 0.75]).inclusion_probabilities(3)          # all or nobody
    array([0.75, 0.75, 0.75])
    """

    q: Sequence[float]

    def __post_init__(self) -> None:
        q = numbers(self, "q")
        if q.ndim != 1 or q.size < 2:
            raise ValueError(f"DoublyUniform.q must be a list, the probabilities of the sizes 0 to n; got {self.q!r}.")
        bad = np.flatnonzero(~((q >= 0) & (q <= 1)))
        if bad.size:
            raise ValueError(f"DoublyUniform.q must lie in [0, 1], got {q[bad[0]]} for size {bad[0]}.")
        if abs(q.sum() - 1) > 1e-9:
            raise ValueError(f"DoublyUniform.q must add up to 1, got {q.sum():.12g}. Divide it by its sum.")
        if not q[1:].any():
            raise ValueError(
                "DoublyUniform.q must give some size above 0 a chance, got q_0 = 1, which draws no client."
            )
        object.__setattr__(self, "q", tuple(q.tolist()))

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        q = self._law(n)
        return np.full(n, min(1.0, q @ np.arange(n + 1) / n))

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        size = rng.choice(n + 1, p=self._law(n))
        return sorted(rng.choice(n, size=size, replace=False).tolist())

    def may_be_empty(self, n: int) -> bool:
        return self.q[0] > 0

    @property
    def symmetric(self) -> bool:
        return True

    def among(self, online: Sequence[int], n: int) -> DoublyUniform:
        m = len(online)
        return DoublyUniform((*self.q[:m], min(1.0, sum(self.q[m:]))))

    def _law(self, n: int) -> NDArray[np.float64]:
        if len(self.q) != n + 1:
            raise ValueError(
                f"DoublyUniform.q has {len(self.q)} probabilities for {n} clients. Give {n + 1}, of the sizes 0 to {n}."
            )
        return np.asarray(np.asarray(self.q) / np.sum(self.q))
