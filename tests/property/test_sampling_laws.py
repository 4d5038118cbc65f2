"""What every sampling promises, whatever its parameters."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from helpers.problems import LAW, seeds
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.sampling import (
    Available,
    Bernoulli,
    Blocks,
    DoublyUniform,
    Full,
    NonemptyBernoulli,
    Systematic,
    Uniform,
    WithReplacement,
)
from lightning_fed.theory.bounds import ExactBounds

chances = st.floats(1e-6, 1.0)
weights = st.floats(1e-6, 1e6)
rounds = st.integers(0, 10**6)


def each(n, values):
    return st.lists(values, min_size=n, max_size=n)


def partitions(n):
    """Blocks by the label that each client draws."""
    labelled = each(n, st.integers(0, 3)).map(
        lambda labels: [[i for i in range(n) if labels[i] == b] for b in range(4)]
    )
    return labelled.map(lambda blocks: Blocks([block for block in blocks if block]))


def size_laws(n):
    raw = each(n + 1, st.floats(0, 1)).filter(lambda q: sum(q[1:]) > 1e-3)
    return raw.map(lambda q: DoublyUniform((np.asarray(q) / np.sum(q)).tolist()))


def bases(n):
    return {
        "full": st.just(Full()),
        "uniform": st.integers(1, n).map(Uniform),
        "coins": (chances | each(n, chances)).map(Bernoulli),
        "nonempty": (chances | each(n, chances)).map(NonemptyBernoulli),
        "blocks": st.integers(1, n).map(Blocks) | partitions(n),
        "doubly": size_laws(n),
        "systematic": st.builds(Systematic, st.integers(1, n), each(n, weights)),
        "replacement": st.builds(WithReplacement, st.integers(1, 2 * n), each(n, weights)),
    }


def available(n):
    base = st.one_of(*bases(n).values())
    schedule = st.lists(st.sets(st.integers(0, n - 1)), max_size=4)
    complete = schedule.map(lambda sets: [*sets, set(range(n)) - set().union(*sets)])
    return {
        "available by coins": st.builds(Available, base, chance=chances | each(n, chances)),
        "available by schedule": st.builds(Available, base, schedule=complete),
    }


KINDS = [*bases(1), *available(1)]
every_kind = pytest.mark.parametrize("kind", KINDS)


@st.composite
def samplings(draw, kind, largest=8):
    n = draw(st.integers(1, largest))
    return draw((bases(n) | available(n))[kind]), n


def sizes(sampler, n):
    """The sizes that a cohort may have."""
    if isinstance(sampler, Full):
        return {n}
    if isinstance(sampler, (Uniform, Systematic)):
        return {sampler.size}
    if isinstance(sampler, Blocks):
        return {len(block) for block in sampler.partition(n)}
    if isinstance(sampler, DoublyUniform):
        return {j for j, q in enumerate(sampler.q) if q > 0}
    most = min(n, sampler.draws) if isinstance(sampler, WithReplacement) else n
    return set(range(0 if sampler.may_be_empty(n) else 1, most + 1))


@every_kind
@given(st.data(), seeds, rounds)
@LAW
def test_cohorts_are_ascending_indices_of_a_promised_size(kind, data, seed, k):
    sampler, n = data.draw(samplings(kind))
    sampler.check(n)
    for cohort in (sampler.cohort(n, seed, k), sampler.draw(n, np.random.default_rng(seed))):
        assert cohort == sorted(set(cohort))
        assert all(type(i) is int and 0 <= i < n for i in cohort)
        assert len(cohort) in sizes(sampler, n)


@every_kind
@given(st.data(), seeds, rounds)
@LAW
def test_cohorts_depend_on_seed_and_round_alone(kind, data, seed, k):
    sampler, n = data.draw(samplings(kind))
    first = sampler.cohort(n, seed, k)
    np.random.seed(k)
    torch.manual_seed(k)
    random.seed(k)
    sampler.cohort(n, seed, k + 1)
    sampler.inclusion_probabilities(n)
    assert sampler.cohort(n, seed, k) == first


@every_kind
@given(st.data())
@LAW
def test_every_client_has_a_probability_above_zero_which_the_theory_accepts(kind, data):
    sampler, n = data.draw(samplings(kind))
    p = sampler.inclusion_probabilities(n)
    assert p.shape == (n,)
    assert p.dtype == np.float64
    assert (p > 0).all()
    assert (p <= 1 + 1e-15 * n).all()
    assert ExactBounds(L=1.0, eta=4.0, p_hat=min(1.0, float(p.min()))).C1 > 0


@pytest.mark.parametrize("kind", ["full", "uniform", "blocks", "doubly", "systematic"])
@given(st.data())
@LAW
def test_probabilities_add_up_to_the_expected_size(kind, data):
    sampler, n = data.draw(samplings(kind))
    if isinstance(sampler, Blocks):
        expected = n / len(sampler.partition(n))
    elif isinstance(sampler, DoublyUniform):
        expected = sum(j * q for j, q in enumerate(sampler.q))
    else:
        (expected,) = sizes(sampler, n)
    assert sampler.inclusion_probabilities(n).sum() == pytest.approx(expected, rel=1e-12)


@every_kind
@given(st.data())
@LAW
def test_sizes_of_many_cohorts_average_to_the_sum_of_probabilities(kind, data):
    sampler, n = data.draw(samplings(kind, largest=5))
    rng, draws = np.random.default_rng(0), 100
    found = np.array([len(sampler.draw(n, rng)) for _ in range(draws)])
    expected = sampler.inclusion_probabilities(n).sum()
    # Hoeffding's inequality: beyond this once in 10^9 examples
    assert abs(found.mean() - expected) <= n * np.sqrt(np.log(2e9) / (2 * draws))


@given(st.data())
@LAW
def test_with_fewer_others_online_nobody_is_drawn_less(data):
    """What the lower bounds of `Available` rest on."""
    kind = data.draw(st.sampled_from(list(bases(1))))
    sampler, n = data.draw(samplings(kind))
    online = sorted(data.draw(st.sets(st.integers(0, n - 1), min_size=1)))
    restricted = sampler.among(online, n).inclusion_probabilities(len(online))
    assert (restricted >= sampler.inclusion_probabilities(n)[online] * (1 - 1e-12)).all()


@given(st.data())
@LAW
def test_relabelling_clients_relabels_their_probabilities(data):
    n = data.draw(st.integers(1, 8))
    order = data.draw(st.permutations(range(n)))
    w, a, size = data.draw(each(n, weights)), data.draw(each(n, chances)), data.draw(st.integers(1, n))
    for build in (
        lambda w, a: Systematic(size, w),
        lambda w, a: WithReplacement(size, w),
        lambda w, a: NonemptyBernoulli(a),
        lambda w, a: Available(Uniform(size), chance=a),
        lambda w, a: Available(WithReplacement(size, w), chance=a),
    ):
        straight = build(w, a).inclusion_probabilities(n)
        shuffled = build([w[i] for i in order], [a[i] for i in order]).inclusion_probabilities(n)
        assert shuffled == pytest.approx(straight[list(order)], rel=1e-9)
