"""Samplings in which clients are drawn independently."""

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
    """Draws each client by its own coin; an empty round changes nothing. Among online clients: the same coins.

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
    r"""Coins, thrown again until a client is drawn: client i has :math:`p_i / (1 - \prod_j (1 - p_j))`.

    Among online clients: the same, until one of them is drawn.

    Args:
        p: probability of a coin in (0, 1], one for all clients or one per client.

    >>> NonemptyBernoulli(0.5).inclusion_probabilities(2)
    array([0.66666667, 0.66666667])
    """

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return np.asarray(np.minimum(1.0, probabilities(self, "p", n) / self._first(n)[-1]))

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        """Draw the first client, then coins for those after it: the law of repeated throws, without repetition."""
        first_by = self._first(n)
        last = np.searchsorted(first_by, first_by[-1])  # no later client can be the first, in spite of rounding
        first = int(min(np.searchsorted(first_by, rng.random() * first_by[-1], side="right"), last))
        rest = probabilities(self, "p", n)[first + 1 :]
        return [first, *(first + 1 + np.flatnonzero(rng.random(rest.size) < rest)).tolist()]

    def may_be_empty(self, n: int) -> bool:
        return False

    def _first(self, n: int) -> NDArray[np.float64]:
        """Probability that one of the clients up to each is drawn; the last entry is that of a nonempty round."""
        p = probabilities(self, "p", n)
        return np.cumsum(p * np.append(1.0, np.cumprod(1 - p)[:-1]))
