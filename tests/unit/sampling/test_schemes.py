"""Every scheme against its law, written down by brute force: the probability of each possible cohort."""

from __future__ import annotations

import math
import pickle
from collections import Counter
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
from helpers.sampling_references import (
    all_online,
    blocks,
    coins,
    doubly,
    nonempty,
    online_by_coins,
    replaced,
    restricted,
    systematic,
    uniform,
)

from lightning_fed.core import hyper_parameters
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

#: 5 * 10^4 draws instead of the specification's 2 * 10^5, for the time; whole cohorts are counted, not only clients.
N, DRAWS = 5, 50_000
P = (0.05, 0.3, 0.5, 0.8, 0.95)
Q = (0.1, 0.3, 0.0, 0.35, 0.0, 0.25)
W = (1.0, 1.0, 2.0, 3.0, 5.0)
PARTS = ((0, 3), (1,), (2, 4))
CHANCE = (0.2, 0.9, 0.5, 1.0, 0.7)
SHIFTS = ((0, 1, 2), (), (3, 4), (0, 4), (1, 2, 3, 4))

SCHEMES = [
    (Full(), all_online),
    (Uniform(2), uniform(2)),
    (Uniform(5), uniform(5)),
    (Bernoulli(0.3), coins([0.3] * N)),
    (Bernoulli(P), coins(P)),
    (Bernoulli((1.0, *P[1:])), coins((1.0, *P[1:]))),
    (NonemptyBernoulli(0.1), nonempty([0.1] * N)),
    (NonemptyBernoulli(1.0), nonempty([1.0] * N)),
    (NonemptyBernoulli((0.05, 0.1, 0.02, 0.2, 0.1)), nonempty((0.05, 0.1, 0.02, 0.2, 0.1))),
    (NonemptyBernoulli((0.3, 0.2, 1.0, 0.1, 0.5)), nonempty((0.3, 0.2, 1.0, 0.1, 0.5))),
    (Blocks(PARTS), blocks(PARTS)),
    (Blocks(2), blocks(((0, 1, 2), (3, 4)))),
    (Blocks(5), uniform(1)),
    (DoublyUniform(Q), doubly(Q)),
    (DoublyUniform((0, 0, 0.5, 0, 0, 0.5)), doubly((0, 0, 0.5, 0, 0, 0.5))),
    (Systematic(3, W), systematic(3, W)),
    (Systematic(2, W), systematic(2, W)),
    (Systematic(1, W), systematic(1, W)),
    (Systematic(5, W), all_online),
    (WithReplacement(3, W), replaced(3, W)),
    (WithReplacement(1, W), systematic(1, W)),
    (WithReplacement(7, [1, 1, 1, 1, 1]), replaced(7, [1] * N)),
]
WITH_COINS = [
    (Available(base, chance=chance), restricted(law, online_by_coins(chance)))
    for base, law in SCHEMES
    for chance in (0.5, CHANCE)
]
WITH_SHIFTS = [
    (Available(base, schedule=SHIFTS), restricted(law, dict.fromkeys(SHIFTS, 1 / len(SHIFTS)))) for base, law in SCHEMES
]
ALL = [(base, dict(law(tuple(range(N))))) for base, law in SCHEMES] + WITH_COINS + WITH_SHIFTS
every_scheme = pytest.mark.parametrize(("sampler", "law"), ALL, ids=[repr(s) for s, _ in ALL])


def one_of_each(*kinds):
    """The first scheme whose name begins so, for slow tests."""
    return [next(pair for pair in ALL if repr(pair[0]).startswith(kind)) for kind in kinds]


DRAWN = one_of_each(
    "Uniform(size=2",
    "Bernoulli(p=(",
    "NonemptyBernoulli(p=(",
    "Blocks(blocks=((",
    "DoublyUniform",
    "Systematic(size=3",
    "WithReplacement(draws=3",
    "Available(base=Uniform(size=2), chance=(",
    "Available(base=DoublyUniform(q=(0.1, 0.3, 0.0, 0.35, 0.0, 0.25)), chance=None",
)


def marginals(law):
    return [sum(p for s, p in law.items() if i in s) for i in range(N)]


# -- the laws hold ----------------------------------------------------------------------------------------------------


@every_scheme
def test_inclusion_probabilities_are_those_of_the_law(sampler, law):
    assert sum(law.values()) == pytest.approx(1, abs=1e-9)
    assert sampler.exact(N)
    assert sampler.inclusion_probabilities(N).tolist() == pytest.approx(marginals(law), abs=1e-10)
    sampler.check(N)


@every_scheme
def test_a_sampling_says_whether_a_round_may_be_empty(sampler, law):
    assert sampler.may_be_empty(N) is (law.get((), 0) > 1e-12)


@every_scheme
def test_only_possible_cohorts_are_drawn(sampler, law):
    rng = np.random.default_rng(2)
    for cohort in [sampler.draw(N, rng) for _ in range(100)] + [sampler.cohort(N, 7, k) for k in range(100)]:
        assert law.get(tuple(cohort), 0) > 0


@pytest.mark.parametrize(
    ("sampler", "law"),
    [pytest.param(s, law, id=repr(s), marks=[pytest.mark.slow] * (i % 3 > 0)) for i, (s, law) in enumerate(DRAWN)],
)
def test_clients_and_cohorts_are_drawn_as_often_as_promised(sampler, law):
    rng = np.random.default_rng(1)
    drawn = Counter(tuple(sampler.draw(N, rng)) for _ in range(DRAWS))
    assert set(drawn) <= set(law)
    for cohort, p in law.items():
        assert abs(drawn[cohort] / DRAWS - p) <= 4 * math.sqrt(p * max(0, 1 - p) / DRAWS) + 1e-12, (cohort, p)
    for i, p in enumerate(sampler.inclusion_probabilities(N)):
        found = sum(count for cohort, count in drawn.items() if i in cohort) / DRAWS
        assert abs(found - p) <= 4 * math.sqrt(p * (1 - p) / DRAWS), (i, p)


def test_systematic_sampling_has_the_probabilities_of_the_specification():
    sampler = Systematic(3, (1, 1, 2, 3, 5, 8))
    assert sampler.inclusion_probabilities(6).tolist() == pytest.approx([1 / 6, 1 / 6, 1 / 3, 1 / 2, 5 / 6, 1])
    rng, hits, draws = np.random.default_rng(0), np.zeros(6), 20_000
    for _ in range(draws):
        cohort = sampler.draw(6, rng)
        assert len(cohort) == 3
        hits[cohort] += 1
    p = sampler.inclusion_probabilities(6)
    assert (np.abs(hits / draws - p) <= 4 * np.sqrt(p * (1 - p) / draws)).all()


def test_clipping_is_repeated_until_nobody_is_above_one():
    assert Systematic(3, (100, 10, 1, 1)).inclusion_probabilities(4).tolist() == pytest.approx([1, 1, 0.5, 0.5])
    assert Systematic(4, (100, 10, 1, 1)).inclusion_probabilities(4).tolist() == [1] * 4


def test_weights_count_by_their_ratios_however_large():
    for scheme in (Systematic, WithReplacement):
        plain = scheme(2, W).inclusion_probabilities(N)
        for factor in (1e-300, 1e-3, 1e307):
            assert scheme(2, [factor * w for w in W]).inclusion_probabilities(N) == pytest.approx(plain)


def test_equal_weights_are_uniform_sampling():
    assert Systematic(3, [0.1] * 7).inclusion_probabilities(7) == pytest.approx(Uniform(3).inclusion_probabilities(7))


class Scripted:
    """A generator whose uniforms are given, and whose permutations are none."""

    def __init__(self, u):
        self.u = u

    def random(self, size=None):
        return self.u if size is None else np.full(size, self.u)

    def permutation(self, x):
        return x


@pytest.mark.parametrize("u", [0.0, 1e-300, 0.5, 1 - 2**-53])
def test_the_size_is_kept_where_sums_round(u):
    for n, size in ((7, 3), (1000, 10), (1000, 999), (3550, 500)):
        weights = np.random.default_rng(n).uniform(0.1, 1, n)
        assert len(Systematic(size, weights).draw(n, Scripted(u))) == size
    for p in ((0.1, 0.2), (0.3, 1.0, 0.2), (1e-12,) * 5):
        assert NonemptyBernoulli(p).draw(len(p), Scripted(u))


def test_rounds_of_rare_clients_are_drawn_at_once():
    sampler = NonemptyBernoulli([1e-12, 3e-12])
    assert sampler.inclusion_probabilities(2).tolist() == pytest.approx([0.25, 0.75])
    drawn = Counter(tuple(sampler.cohort(2, 0, k)) for k in range(2000))
    assert set(drawn) == {(0,), (1,)}
    assert abs(drawn[(0,)] / 2000 - 0.25) <= 4 * math.sqrt(0.25 * 0.75 / 2000)


# -- availability -----------------------------------------------------------------------------------------------------


def test_a_schedule_is_followed_round_by_round_from_the_start_again():
    sampler = Available(Full(), schedule=SHIFTS)
    assert [tuple(sampler.cohort(N, 3, k)) for k in range(10)] == [*SHIFTS, *SHIFTS]


def test_over_whole_periods_cohorts_are_as_frequent_as_the_average_says():
    sampler, periods = Available(Uniform(2), schedule=SHIFTS), 2000
    hits = np.zeros(N)
    for k in range(periods * len(SHIFTS)):
        hits[sampler.cohort(N, 0, k)] += 1
    p = sampler.inclusion_probabilities(N)
    assert p.tolist() == pytest.approx([(2 / 3 + 1) / 5, (2 / 3 + 1 / 2) / 5, (2 / 3 + 1 / 2) / 5, 1.5 / 5, 2.5 / 5])
    assert (np.abs(hits / (periods * len(SHIFTS)) - p) <= 4 * np.sqrt(p * (1 - p) / periods / len(SHIFTS))).all()


def test_those_who_are_away_are_never_drawn_and_those_online_fill_the_cohort():
    sampler = Available(Uniform(3), schedule=SHIFTS)
    for k in range(50):
        online, cohort = SHIFTS[k % len(SHIFTS)], sampler.cohort(N, 0, k)
        assert set(cohort) <= set(online)
        assert len(cohort) == min(3, len(online))


def test_always_online_changes_no_probability():
    for base, _ in SCHEMES:
        plain = base.inclusion_probabilities(N)
        for always in (Available(base, chance=1.0), Available(base, schedule=[range(N)])):
            assert always.inclusion_probabilities(N) == pytest.approx(plain, abs=1e-14)
            assert always.may_be_empty(N) == base.may_be_empty(N)


def test_many_unreliable_unequal_clients_get_lower_bounds():
    n = 13
    weights = np.arange(1.0, n + 1)
    for base in (Systematic(4, weights), WithReplacement(4, weights), NonemptyBernoulli(weights / 50)):
        sampler = Available(base, chance=0.5)
        assert not sampler.exact(n)
        assert sampler.inclusion_probabilities(n) == pytest.approx(0.5 * base.inclusion_probabilities(n))
        one_reliable = Available(base, chance=(1.0, *[0.5] * (n - 1)))
        assert one_reliable.exact(n)
        assert (one_reliable.inclusion_probabilities(n)[1:] >= sampler.inclusion_probabilities(n)[1:]).all()


def test_many_unreliable_clients_that_are_treated_alike_have_exact_probabilities():
    n, size, a = 400, 10, 0.1
    sampler = Available(Uniform(size), chance=a)
    assert sampler.exact(n)
    binomial = [math.comb(n - 1, m) * a**m * (1 - a) ** (n - 1 - m) for m in range(n)]
    expected = a * sum(p * min(size, m + 1) / (m + 1) for m, p in enumerate(binomial))
    assert sampler.inclusion_probabilities(n) == pytest.approx(np.full(n, expected), rel=1e-11)


def test_how_to_restrict_a_sampling_of_ones_own_must_be_said():
    class Mine(Sampler):
        def inclusion_probabilities(self, n):
            return np.ones(n)

        def draw(self, n, rng):
            return list(range(n))

    with pytest.raises(TypeError, match=r"Mine does not define how to draw if some clients are away\. Define .* among"):
        Available(Mine(), chance=0.5)

    class Restricted(Mine):
        def among(self, online, n):
            return Full()

    sampler = Available(Restricted(), chance=0.5)
    assert sampler.inclusion_probabilities(3).tolist() == [0.5] * 3
    assert len(sampler.cohort(30, 0, 0)) < 30


# -- as values ------------------------------------------------------------------------------------------------------


@every_scheme
def test_samplings_are_frozen_values(sampler, law):
    again = pickle.loads(pickle.dumps(sampler))
    assert again == sampler
    assert hash(again) == hash(sampler)
    assert again.cohort(N, 5, 5) == sampler.cohort(N, 5, 5)
    with pytest.raises(FrozenInstanceError):
        sampler.anything = 1
    assert hyper_parameters(sampler)["name"] == type(sampler).__name__


def test_changing_the_answer_does_not_change_the_sampling():
    sampler = Systematic(2, W)
    sampler.inclusion_probabilities(N)[:] = 0
    sampler.check(N)
