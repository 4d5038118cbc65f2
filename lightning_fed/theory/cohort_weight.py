r"""The weight of a cohort that a given client is in: :math:`E[W \mid i \in S]`, :math:`W = \sum_{j\in S} w_j`."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_fed.sampling import (
    Available,
    Bernoulli,
    Blocks,
    DoublyUniform,
    Full,
    NonemptyBernoulli,
    Sampler,
    Systematic,
    Uniform,
    WithReplacement,
)
from lightning_fed.sampling.base import probabilities

Vector = NDArray[np.float64]

#: Largest number of clients for which the probabilities of all pairs are computed.
PAIRS = 1000


def cohort_weight(sampler: Sampler, weights: Sequence[float] | Vector) -> tuple[Vector, Vector]:
    r"""Lower and upper bounds on :math:`E[W \mid i \in S]` for every client i, with ``weights`` scaled to sum to 1.

    Both are equal, and exact, for `Full`, `Uniform`, `DoublyUniform`, `Blocks`, `Bernoulli`, `NonemptyBernoulli`,
    `Available` coins in front of `Full` or `Bernoulli`, and `WithReplacement` of at most 1000 clients. Otherwise the
    cohort holds at least client i and the clients that are always drawn, and at most client i and the heaviest others
    that its largest size allows.

    >>> low, high = cohort_weight(Uniform(2), [2, 1, 1])
    >>> low, high                                       # 1/2 and half of the other half; 1/4 and half of 3/4
    (array([0.75 , 0.625, 0.625]), array([0.75 , 0.625, 0.625]))
    """
    w = normalised(weights)
    exact = _exact(sampler, w)
    return (exact, exact) if exact is not None else _bounds(sampler, w)


def normalised(weights: Sequence[float] | Vector) -> Vector:
    """Weights that sum to 1; refuse any that are not positive and finite."""
    w = np.asarray(weights, dtype=float)
    if w.ndim != 1 or not w.size or not (np.isfinite(w) & (w > 0)).all():
        raise ValueError(f"weights must be a list of positive finite numbers, one per client, got {weights!r}.")
    w = w / w.max()  # first, as the sum of large ones may overflow
    return np.asarray(w / w.sum())


def largest_cohort(sampler: Sampler, n: int) -> int:
    """The most clients that a cohort of ``n`` can have; ``n`` where the sampling does not say."""
    if type(sampler) is Available:
        return largest_cohort(sampler.base, n)
    if type(sampler) is Uniform or type(sampler) is Systematic:
        return min(n, sampler.size)
    if type(sampler) is WithReplacement:
        return min(n, sampler.draws)
    return max(map(len, sampler.partition(n))) if type(sampler) is Blocks else n


def _exact(sampler: Sampler, w: Vector) -> Vector | None:
    n = w.size
    if (share := _share_of_others(sampler, n)) is not None:
        return w + share * (1 - w)
    if (coins := _coins(sampler, n)) is not None:
        return np.asarray(w + coins @ w - coins * w)
    if type(sampler) is Blocks:
        total = np.empty(n)
        for block in map(list, sampler.partition(n)):
            total[block] = w[block].sum()
        return total
    return _with_replacement(sampler, w) if type(sampler) is WithReplacement and n <= PAIRS else None


def _share_of_others(sampler: Sampler, n: int) -> float | None:
    """Probability that client j is drawn if client i is, where it is the same for all pairs."""
    sampler.inclusion_probabilities(n)  # refuses a sampling of another number of clients
    if type(sampler) is Full:
        return 1.0
    if type(sampler) is Uniform:
        return (sampler.size - 1) / max(1, n - 1)
    if type(sampler) is DoublyUniform:
        drawn = np.asarray(sampler.q) * np.arange(n + 1)  # proportional to the law of the size, given client i
        return float(drawn @ np.arange(-1, n) / drawn.sum() / max(1, n - 1))
    return None


def _coins(sampler: Sampler, n: int) -> Vector | None:
    """Probability that client j is drawn if client i is, where it depends on j alone.

    A client that is drawn makes the round nonempty, so that the other coins of `NonemptyBernoulli` are free.
    """
    if type(sampler) in (Bernoulli, NonemptyBernoulli):
        return probabilities(sampler, "p", n)
    if type(sampler) is Available and sampler.schedule is None and type(sampler.base) in (Full, Bernoulli):
        return sampler.inclusion_probabilities(n)
    return None


def _with_replacement(sampler: WithReplacement, w: Vector) -> Vector:
    r"""By :math:`P(i, j \in S) = p_i + p_j - 1 + (1 - q_i - q_j)^D`, for D draws with probabilities q."""
    q, p = normalised(sampler.weights), sampler.inclusion_probabilities(w.size)
    neither = np.maximum(0.0, 1 - q[:, None] - q[None, :]) ** sampler.draws
    given = 1 - (1 - p[None, :] - neither) / p[:, None]
    np.fill_diagonal(given, 1.0)
    return np.asarray(given @ w)


def _bounds(sampler: Sampler, w: Vector) -> tuple[Vector, Vector]:
    sure = sampler.inclusion_probabilities(w.size) >= 1
    low = np.where(sure, w[sure].sum(), w[sure].sum() + w)
    heaviest, size = np.sort(w)[::-1], largest_cohort(sampler, w.size)
    high = heaviest[: size - 1].sum() + np.minimum(w, heaviest[size - 1])  # client i counts once
    return low, np.maximum(low, high)  # equal up to rounding if everybody is drawn
