"""Samplings among the clients that are online."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.randomness import numpy_generator
from lightning_fed.sampling.base import (
    Sampler,
    freeze_client_sets,
    freeze_probabilities,
    probabilities,
    refuse_strangers,
)
from lightning_fed.sampling.blocks import Blocks
from lightning_fed.sampling.coins import Bernoulli

#: Largest number of unreliable clients for which all sets of online clients are enumerated: 2^12 sets.
ENUMERATED = 12


@dataclass(frozen=True)
class Available(Sampler):
    r"""Draws by ``base`` among the clients that are online (``Uniform(10)`` draws all if there are fewer).

    A round without online clients is empty. Give either ``chance`` or ``schedule``.

    Args:
        base: the sampling of online clients.
        chance: probability in (0, 1] to be online, one for all or one per client, independent in every round.
        schedule: sets of clients online in rounds 0, 1, 2, ..., repeated from the start. The rounds are then not
            independent draws of one law, which the theory assumes: probabilities are averages over a period, and
            :meth:`draw` takes a round of the period at random.

    Probabilities are :math:`\sum_A P(A)\,P(i \in S \mid A)` over the sets A online; see :meth:`exact`.

    >>> from lightning_fed.sampling import Uniform
    >>> Available(Uniform(1), chance=0.5).inclusion_probabilities(2)           # 1/4 alone + 1/4 in company, then 1/2
    array([0.375, 0.375])
    >>> day_and_night = Available(Uniform(1), schedule=[[0, 1], [2]])
    >>> day_and_night.inclusion_probabilities(3)
    array([0.25, 0.25, 0.5 ])
    >>> day_and_night.cohort(3, seed=0, round=7)
    [2]
    """

    base: Sampler
    chance: float | Sequence[float] | None = None
    schedule: Sequence[Sequence[int]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.base, Sampler) or isinstance(self.base, Available):
            raise TypeError(f"Available.base must be another sampling such as Uniform(10), got {self.base!r}.")
        if type(self.base).among is Sampler.among:
            self.base.among([0], 1)
        if (self.chance is None) == (self.schedule is None):
            raise ValueError("Give Available either chance, a probability to be online, or schedule, sets of clients.")
        if self.schedule is None:
            freeze_probabilities(self, "chance")
            return
        freeze_client_sets(self, "schedule")
        object.__setattr__(self, "schedule", tuple(tuple(sorted(set(online))) for online in self.schedule))
        if not self.schedule:
            raise ValueError("Available.schedule must have at least one round, got none.")

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        everybody = self.base.inclusion_probabilities(n)
        if self.schedule is not None:
            self._check_schedule(n)
            return np.asarray(np.mean([_scattered(self.base, online, n) for online in self.schedule], axis=0))
        a = probabilities(self, "chance", n)
        if type(self.base) is Blocks:
            return a * _with_blocks(self.base.partition(n), a)
        if self.base.symmetric:
            share = [self.base.among(range(m), n).inclusion_probabilities(m)[0] for m in range(1, n + 1)]
            return a * with_others(a, np.asarray(share))
        if type(self.base) is Bernoulli or not self.exact(n):
            return a * everybody
        return sum((p * _scattered(self.base, online, n) for online, p in _online_sets(a)), np.zeros(n))

    def exact(self, n: int) -> bool:
        """False only with coins, unequal clients in ``base``, and more than 12 clients that may be away.

        The probability is then the one with all clients online, which is the least, times the chance to be online. This
        concerns ``Systematic``, ``WithReplacement`` and ``NonemptyBernoulli``.
        """
        if self.schedule is not None or self.base.symmetric or type(self.base) in (Bernoulli, Blocks):
            return True
        return int((probabilities(self, "chance", n) < 1).sum()) <= ENUMERATED

    def cohort(self, n: int, seed: int, round: int) -> list[int]:
        rng = numpy_generator(seed, round, "cohort")
        if self.schedule is None:
            return self.draw(n, rng)
        return self._draw_among(self.schedule[round % len(self.schedule)], n, rng)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        if self.schedule is not None:
            return self._draw_among(self.schedule[int(rng.integers(len(self.schedule)))], n, rng)
        return self._draw_among(np.flatnonzero(rng.random(n) < probabilities(self, "chance", n)).tolist(), n, rng)

    def may_be_empty(self, n: int) -> bool:
        least: Sequence[Sequence[int]]
        if self.schedule is not None:
            least = self.schedule
        else:
            least = [np.flatnonzero(probabilities(self, "chance", n) == 1).tolist()]
        return any(not online or self.base.among(online, n).may_be_empty(len(online)) for online in least)

    def _draw_among(self, online: Sequence[int], n: int, rng: np.random.Generator) -> list[int]:
        refuse_strangers(self, "schedule", online, n)
        return [online[j] for j in self.base.among(online, n).draw(len(online), rng)] if online else []

    def _check_schedule(self, n: int) -> None:
        assert self.schedule is not None
        seen = sorted(set(itertools.chain.from_iterable(self.schedule)))
        refuse_strangers(self, "schedule", seen, n)
        never = next((i for i in range(n) if i >= len(seen) or seen[i] != i), None)
        if never is not None:
            raise ValueError(
                f"Available.schedule never has client {never} of {n} online: not a proper sampling. "
                "Give it a round, or leave it out of the federation."
            )


def _scattered(base: Sampler, online: Sequence[int], n: int) -> NDArray[np.float64]:
    """Probabilities of all ``n`` clients in a round that reaches ``online``."""
    p = np.zeros(n)
    if online:
        p[list(online)] = base.among(online, n).inclusion_probabilities(len(online))
    return p


def _online_sets(a: NDArray[np.float64]) -> list[tuple[list[int], float]]:
    """Every set that may be online, with its probability."""
    sets = []
    for coins in itertools.product((False, True), repeat=int((a < 1).sum())):
        online = a == 1
        online[a < 1] = coins
        sets.append((np.flatnonzero(online).tolist(), float(np.where(online, a, 1 - a).prod())))
    return sets


def _with_blocks(blocks: Sequence[Sequence[int]], a: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability that a client's block is drawn, given that the client is online."""
    somebody = np.asarray([1 - np.prod(1 - a[list(block)]) for block in blocks])
    drawn, p = with_others(somebody, 1 / np.arange(1, len(blocks) + 1)), np.empty(len(a))
    for block, probability in zip(blocks, drawn, strict=True):
        p[list(block)] = probability
    return p


def with_others(a: NDArray[np.float64], share: NDArray[np.float64]) -> NDArray[np.float64]:
    r""":math:`E\,h(1 + \#\{j \ne i: j\ \text{online}\})` for each i, where ``share`` is h(1), ..., h(n).

    The number of others is Poisson-binomial. With :math:`v_i(c)` the expectation when c of the clients before i are
    online, over those from i on, and :math:`P_i` the law of c, the answer is :math:`\sum_c P_i(c)\,v_{i+1}(c)`; both
    are found by one pass and only ever average, so that nothing cancels.

    >>> with_others(np.array([0.5, 0.5]), np.array([1.0, 0.5]))
    array([0.75, 0.75])
    """
    after = [share]
    for a_i in a[:0:-1]:
        after.append((1 - a_i) * after[-1][:-1] + a_i * after[-1][1:])
    before, found = np.ones(1), np.empty(len(a))
    for i, a_i in enumerate(a):
        found[i] = before @ after.pop()
        before = np.append((1 - a_i) * before, 0.0) + np.append(0.0, a_i * before)
    return found
