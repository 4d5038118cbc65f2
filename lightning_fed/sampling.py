"""Who takes part in a round: proper samplings, drawn from (seed, round) alone.

A sampling is *proper* when every client has a positive probability of being drawn; FedADMM and FedDR converge under
any proper sampling and need no importance weights.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fed.arguments import whole
from lightning_fed.randomness import numpy_generator


class Sampler(ABC):
    """Law of the set of active clients. Rounds are independent draws of the same law."""

    @abstractmethod
    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        """Exact probability of each of ``n`` clients to be in a round's cohort."""

    @abstractmethod
    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        """Indices of one cohort, ascending."""

    def cohort(self, n: int, seed: int, round: int) -> list[int]:
        """The cohort of ``round``: always the same for the same ``(n, seed, round)``.

        >>> Uniform(2).cohort(5, seed=0, round=3) == Uniform(2).cohort(5, seed=0, round=3)
        True
        """
        return self.draw(n, numpy_generator(seed, round, "cohort"))

    def check(self, n: int) -> None:
        """Refuse a sampling that cannot draw from ``n`` clients, or never draws one of them."""
        never = np.flatnonzero(self.inclusion_probabilities(n) <= 0)
        if never.size:
            raise ValueError(
                f"{self} never draws client {never[0]} of {n}: not a proper sampling. Give every client a chance."
            )


@dataclass(frozen=True)
class Full(Sampler):
    """Everybody, every round."""

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return np.ones(n)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        return list(range(n))


@dataclass(frozen=True)
class Uniform(Sampler):
    """``size`` clients, uniformly without replacement.

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


@dataclass(frozen=True)
class Bernoulli(Sampler):
    """Each client by its own coin; a round may be empty, and then changes nothing.

    Args:
        p: probability in (0, 1], one for all clients or one per client.

    >>> Bernoulli([0.5, 1.0]).inclusion_probabilities(2)
    array([0.5, 1. ])
    """

    p: float | Sequence[float]

    def __post_init__(self) -> None:
        p = np.asarray(self.p, dtype=float)
        if p.ndim > 1:
            raise ValueError(f"Bernoulli.p must be one probability or a list of them, got shape {p.shape}.")
        bad = np.flatnonzero(~((p > 0) & (p <= 1)))
        if bad.size:
            whose = f" for client {bad[0]}" if p.ndim else ""
            raise ValueError(f"Bernoulli.p must lie in (0, 1], got {np.atleast_1d(p)[bad[0]]}{whose}.")
        if p.ndim:
            object.__setattr__(self, "p", tuple(p.tolist()))

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        p = np.asarray(self.p, dtype=float)
        if p.ndim and p.size != n:
            raise ValueError(f"Bernoulli.p has {p.size} probabilities for {n} clients. Give one, or one per client.")
        return np.full(n, p) if p.ndim == 0 else p

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        hit: list[int] = np.flatnonzero(rng.random(n) < self.inclusion_probabilities(n)).tolist()
        return hit
