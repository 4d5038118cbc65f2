"""Laws of samplings, written out: who is online -> probability of every cohort."""

from __future__ import annotations

import itertools
import math
from collections import Counter

import numpy as np

#: 5 * 10^4 draws instead of the specification's 2 * 10^5, for the time; whole cohorts are counted, not only clients.
N, DRAWS = 5, 50_000


def all_online(online):
    return {online: 1.0}


def uniform(size):
    def law(online):
        sets = list(itertools.combinations(online, min(size, len(online))))
        return dict.fromkeys(sets, 1 / len(sets))

    return law


def coins(p):
    def law(online):
        sets = itertools.chain.from_iterable(itertools.combinations(online, m) for m in range(len(online) + 1))
        return {s: math.prod(p[i] if i in s else 1 - p[i] for i in online) for s in sets}

    return law


def nonempty(p):
    def law(online):
        somebody = {s: q for s, q in coins(p)(online).items() if s}
        return {s: q / sum(somebody.values()) for s, q in somebody.items()}

    return law


def blocks(parts):
    def law(online):
        left = [s for part in parts if (s := tuple(i for i in part if i in online))]
        return {s: 1 / len(left) for s in left}

    return law


def doubly(q):
    def law(online):
        total = Counter()
        for j, q_j in enumerate(q):
            for s, p in uniform(j)(online).items():
                total[s] += q_j * p
        return total

    return law


def systematic(size, w):
    def law(online):
        pi, total = targets(min(size, len(online)), [w[i] for i in online]), Counter()
        for order in itertools.permutations(range(len(online))):
            ends = np.round(np.cumsum([pi[j] for j in order]), 12)
            starts = np.append(0.0, ends[:-1])
            cuts = sorted({0.0, 1.0, *np.round(ends % 1, 12).tolist()})
            for low, high in itertools.pairwise(cuts):
                points = (low + high) / 2 + np.arange(round(ends[-1]))
                hit = [j for j, a, b in zip(order, starts, ends, strict=True) if ((a <= points) & (points < b)).any()]
                total[tuple(sorted(online[j] for j in hit))] += (high - low) / math.factorial(len(online))
        return total

    return law


def targets(size, w):
    """min(1, kappa w) adding up to ``size``, by bisection of kappa."""
    low, high = 0.0, size / min(w)
    for _ in range(200):
        kappa = (low + high) / 2
        low, high = (kappa, high) if np.minimum(1, kappa * np.asarray(w)).sum() < size else (low, kappa)
    return np.minimum(1, high * np.asarray(w))


def replaced(draws, w):
    def law(online):
        total, all_w = Counter(), sum(w[i] for i in online)
        for drawn in itertools.product(online, repeat=draws):
            total[tuple(sorted(set(drawn)))] += math.prod(w[i] / all_w for i in drawn)
        return total

    return law


def online_by_coins(a):
    return coins([a] * N if isinstance(a, float) else a)(tuple(range(N)))


def restricted(law, online_sets):
    """The mixture over who is online; nobody online is an empty round."""
    total = Counter()
    for online, p in online_sets.items():
        for s, q in (law(online) if online else {(): 1.0}).items():
            total[s] += p * q
    return total
