"""Who takes part, and the seeds that decide it."""

import itertools
import math
import random

import numpy as np
import pytest
import torch
from helpers.problems import LAW, seeds
from hypothesis import given
from hypothesis import strategies as st

from lightning_fed.core.randomness import derive_seed, numpy_generator, seed_global, torch_generator
from lightning_fed.sampling import Bernoulli, Full, Sampler, Uniform

#: Samplings of six clients with their exact probabilities.
N, DRAWS = 6, 20_000
CHANCES = (0.05, 0.2, 0.5, 0.5, 0.9, 1.0)
SAMPLERS = [
    (Full(), [1.0] * N),
    (Uniform(1), [1 / 6] * N),
    (Uniform(2), [1 / 3] * N),
    (Uniform(5), [5 / 6] * N),
    (Uniform(6), [1.0] * N),
    (Bernoulli(0.25), [0.25] * N),
    (Bernoulli(1.0), [1.0] * N),
    (Bernoulli(CHANCES), list(CHANCES)),
]
every_sampler = pytest.mark.parametrize(("sampler", "p"), SAMPLERS, ids=[repr(s) for s, _ in SAMPLERS])


def indicator_matrix(sampler, draws=DRAWS, seed=1):
    """One row per round, one column per client."""
    hits = np.zeros((draws, N))
    for k in range(draws):
        hits[k, sampler.cohort(N, seed, k)] = 1
    return hits


def within_four_sigma(frequencies, p, draws=DRAWS):
    p = np.asarray(p)
    return bool((np.abs(frequencies - p) <= 4 * np.sqrt(p * (1 - p) / draws)).all())


@every_sampler
def test_inclusion_probabilities_are_exact(sampler, p):
    found = sampler.inclusion_probabilities(N)
    assert found.shape == (N,)
    assert found.tolist() == pytest.approx(p, abs=1e-15)
    sampler.check(N)


@pytest.mark.parametrize("sampler", [Uniform(2), Bernoulli(CHANCES)], ids=repr)
def test_clients_and_pairs_are_drawn_as_often_as_promised(sampler):
    hits = indicator_matrix(sampler)
    assert within_four_sigma(hits.mean(0), sampler.inclusion_probabilities(N))
    p = sampler.inclusion_probabilities(N)
    for i, j in itertools.combinations(range(N), 2):
        together = p[i] * p[j] if isinstance(sampler, Bernoulli) else 2 * 1 / (N * (N - 1))
        assert within_four_sigma((hits[:, i] * hits[:, j]).mean(), together)
    consecutive = (hits[1:] * hits[:-1]).mean(0)  # rounds are independent
    assert (np.abs(consecutive - p**2) <= 4 * np.sqrt(3 / DRAWS) * np.sqrt(p**2 * (1 - p**2)) + 1e-12).all()


def test_every_subset_of_the_asked_size_is_equally_likely():
    rng = np.random.default_rng(0)
    drawn = [tuple(Uniform(2).draw(4, rng)) for _ in range(DRAWS)]
    for pair in itertools.combinations(range(4), 2):
        assert within_four_sigma(drawn.count(pair) / DRAWS, 1 / 6)


def test_coins_leave_a_round_empty_as_often_as_they_should():
    rng = np.random.default_rng(0)
    sampler = Bernoulli((0.5, 0.2, 0.1))
    empty = sum(not sampler.draw(3, rng) for _ in range(DRAWS)) / DRAWS
    assert within_four_sigma(empty, 0.5 * 0.8 * 0.9)


@every_sampler
@given(seeds, st.integers(0, 10**6))
@LAW
def test_cohorts_are_ascending_unique_indices_of_the_asked_size(sampler, p, seed, k):
    cohort = sampler.cohort(N, seed, k)
    assert cohort == sorted(set(cohort))
    assert all(type(i) is int and 0 <= i < N for i in cohort)
    if not isinstance(sampler, Bernoulli):
        assert len(cohort) == round(sum(p))


@every_sampler
@given(seeds, st.integers(0, 10**6))
@LAW
def test_cohorts_depend_on_seed_and_round_alone(sampler, p, seed, k):
    first = sampler.cohort(N, seed, k)
    np.random.seed(k)
    torch.manual_seed(k)
    random.seed(k)
    sampler.cohort(N, seed, k + 1)
    assert sampler.cohort(N, seed, k) == first


@pytest.mark.parametrize("sampler", [Uniform(3), Bernoulli(0.5)], ids=repr)
def test_other_rounds_and_other_seeds_give_other_cohorts(sampler):
    rounds = [tuple(sampler.cohort(20, 0, k)) for k in range(50)]
    other_seed = [tuple(sampler.cohort(20, 1, k)) for k in range(50)]
    assert len(set(rounds)) > 45
    assert sum(a == b for a, b in zip(rounds, other_seed, strict=True)) < 5


def test_full_draws_everybody():
    assert Full().cohort(4, 0, 0) == [0, 1, 2, 3]
    assert Bernoulli(1.0).cohort(4, 0, 0) == [0, 1, 2, 3]


@pytest.mark.parametrize("size", [0, -1, 1.5, 2.0, "2", None, True], ids=repr)
def test_a_size_that_is_no_whole_number_from_one_is_refused(size):
    with pytest.raises(ValueError, match=rf"Uniform\.size must be a whole number >= 1, got {size!r}"):
        Uniform(size)


def test_more_clients_than_there_are_cannot_be_drawn():
    Uniform(5).check(5)
    with pytest.raises(ValueError, match=r"Cannot draw 6 clients per round: the federation has 5\. Use at most 5"):
        Uniform(6).check(5)


@pytest.mark.parametrize("p", [0.0, -0.1, 1.1, float("nan")])
def test_chances_outside_zero_to_one_are_refused(p):
    with pytest.raises(ValueError, match=rf"Bernoulli\.p must lie in \(0, 1\], got {p}"):
        Bernoulli(p)
    with pytest.raises(ValueError, match=rf"Bernoulli\.p must lie in \(0, 1\], got {p} for client 2"):
        Bernoulli([0.5, 1.0, p])


def test_chances_must_be_one_or_one_per_client():
    Bernoulli([0.5, 0.5]).check(2)
    for n in (1, 3):
        with pytest.raises(ValueError, match=rf"Bernoulli\.p has 2 probabilities for {n} clients"):
            Bernoulli([0.5, 0.5]).check(n)


def test_an_improper_sampling_is_refused_by_name():
    class OnlyEven(Sampler):
        def __repr__(self):
            return "OnlyEven()"

        def inclusion_probabilities(self, n):
            return 1.0 - np.arange(n) % 2

        def draw(self, n, rng):
            return list(range(0, n, 2))

    OnlyEven().check(1)
    with pytest.raises(ValueError, match=r"OnlyEven\(\) never draws client 1 of 4: not a proper sampling"):
        OnlyEven().check(4)


def test_samplers_compare_by_value_and_can_be_hashed():
    assert Bernoulli([0.5, 1.0]) == Bernoulli((0.5, 1.0)) != Bernoulli(0.5)
    assert len({Full(), Full(), Uniform(2), Uniform(2), Bernoulli([0.5]), Bernoulli((0.5,))}) == 3
    with pytest.raises(TypeError, match="abstract"):
        Sampler()


keys = st.lists(st.one_of(st.integers(-5, 200), st.text("ab1,' ", max_size=3)), max_size=4).map(tuple)


@given(keys, keys)
@LAW
def test_equal_keys_give_equal_seeds_and_unlike_keys_unlike_ones(left, right):
    assert 0 <= derive_seed(*left) < 2**63
    assert (derive_seed(*left) == derive_seed(*right)) == (left == right)


def test_keys_do_not_run_into_one_another():
    unlike = [(0, 11), (0, 1, 1), (1, 10), (11, 0), (110,), ("0", 11), (0, "11"), ("0, 11",), (), (0,), (0, 0)]
    assert len({derive_seed(*key) for key in unlike}) == len(unlike)


def test_seeds_of_neighbouring_rounds_share_no_pattern():
    bits = [bin(derive_seed(0, k) ^ derive_seed(0, k + 1)).count("1") for k in range(1000)]
    assert abs(np.mean(bits) - 31.5) < 4 * math.sqrt(63 / 4 / 1000)


def test_seeds_never_change_between_versions():
    assert derive_seed(0, 1, "cohort") == SEED_OF_ROUND_ONE
    assert numpy_generator(0, 1).random() == numpy_generator(0, 1).random()
    assert torch.equal(torch.rand(3, generator=torch_generator(0, 1)), torch.rand(3, generator=torch_generator(0, 1)))


def test_global_seeding_makes_every_library_repeat_itself():
    def draw():
        return random.random(), np.random.rand(), float(torch.rand(()))

    seed_global(0, 1, "client")
    first = draw()
    seed_global(0, 2, "client")
    other = draw()
    seed_global(0, 1, "client")
    assert draw() == first
    assert all(a != b for a, b in zip(first, other, strict=True))


# The first 63 bits of sha256("(0, 1, 'cohort')"); a change would silently redraw every published run.
SEED_OF_ROUND_ONE = 8259294092262859150
