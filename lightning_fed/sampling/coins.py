"""Samplings in which clients decide independently."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from lightning_fed.sampling.base import Sampler, freeze_probabilities, probabilities

Coins = TypeVar("Coins", bound="Bernoulli")


@dataclass(frozen=True)
class Bernoulli(Sampler):
    """Each client by its own coin; a round may be empty, and then changes nothing. Of those online: the same coins.

    Args:
        p: probability in (0, 1], one for all clients or one per client.

    >>> Bernoulli([0.5, 1.0]).inclusion_probabilities(2)
    array([0.5, 1. ])
    """

    p: float | Sequence[float]

    def __post_init__(self) -> None:
        freeze_probabilities(self, "p")

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return probabilities(self, "p", n)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        hit: list[int] = np.flatnonzero(rng.random(n) < probabilities(self, "p", n)).tolist()
        return hit

    def may_be_empty(self, n: int) -> bool:
        return bool((probabilities(self, "p", n) < 1).all())

    @property
    def symmetric(self) -> bool:
        return np.ndim(self.p) == 0

    def among(self: Coins, online: Sequence[int], n: int) -> Coins:
        return self if self.symmetric else replace(self, p=probabilities(self, "p", n)[list(online)].tolist())


@dataclass(frozen=True)
class NonemptyBernoulli(Bernoulli):
    r"""Coins, thrown again until somebody is drawn: client i has :math:`p_i / (1 - \prod_j (1 - p_j))`.

    Of those online: the same, thrown until one of them is drawn.

    Args:
        p: probability of a coin in (0, 1], one for all clients or one per client.

    >>> NonemptyBernoulli(0.5).inclusion_probabilities(2)
    array([0.66666667, 0.66666667])
    """

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return np.asarray(np.minimum(1.0, probabilities(self, "p", n) / self._first(n)[-1]))

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        """Who is the first one drawn, then coins for those after: the same law as repetition, which may take long."""
        first_by = self._first(n)
        last = np.searchsorted(first_by, first_by[-1])  # nobody after can be the first, whatever rounding says
        first = int(min(np.searchsorted(first_by, rng.random() * first_by[-1], side="right"), last))
        rest = probabilities(self, "p", n)[first + 1 :]
        return [first, *(first + 1 + np.flatnonzero(rng.random(rest.size) < rest)).tolist()]

    def may_be_empty(self, n: int) -> bool:
        return False

    def _first(self, n: int) -> NDArray[np.float64]:
        """Probability that coins hit one of the clients up to each; the last entry is that of a round with somebody."""
        p = probabilities(self, "p", n)
        return np.cumsum(p * np.append(1.0, np.cumprod(1 - p)[:-1]))
