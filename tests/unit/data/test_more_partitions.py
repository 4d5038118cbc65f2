"""Pathological and Continuous partitions, and functions as partitioners."""

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.partition import IID, Continuous, Pathological, as_partitioner, labels_of


def labelled(n, classes):
    return TensorDataset(torch.arange(n), torch.arange(n) % classes)


def indices(dealt):
    return sorted(index for held in dealt.values() for index in held)


@given(st.integers(1, 9), st.integers(1, 9), st.integers(1, 9), st.integers(0, 99))
@settings(max_examples=80, deadline=None)
def test_pathological_clients_have_k_classes_and_share_them_evenly(clients, k, classes, seed):
    if not k <= classes <= clients * k:
        return
    dataset = labelled(30 * classes, classes)
    dealt = Pathological(clients, k, seed)(dataset)
    assert indices(dealt) == list(range(len(dataset)))
    held = np.array([np.bincount(np.array(own) % classes, minlength=classes) for own in dealt.values()])
    assert ((held > 0).sum(axis=1) == k).all()
    owners = (held > 0).sum(axis=0)
    assert owners.max() - owners.min() <= 1
    for by_client in held.T:
        shares = by_client[by_client > 0]
        assert shares.max() - shares.min() <= 1


def test_pathological_clients_differ_in_their_pairs_of_classes():
    dealt = Pathological(clients=20, classes_per_client=2)(labelled(400, 5))
    pairs = {frozenset(index % 5 for index in held) for held in dealt.values()}
    assert len(pairs) > 5  # a fixed cycle of classes has 5


@pytest.mark.parametrize(
    ("rule", "message"),
    [
        (Pathological(2, 2), r"2 clients with 2 classes each cannot own all 5 classes. Use at least 3 clients or 3"),
        (Pathological(9, 6), r"classes_per_client is 6, but the dataset has 5 classes"),
        (Pathological(50, 2), r"gives class 0 to \d+ clients, but it has 10 samples"),
    ],
)
def test_pathological_says_which_numbers_do_not_fit(rule, message):
    with pytest.raises(ValueError, match=message):
        rule(labelled(50, 5))


@pytest.mark.parametrize("rule", [Pathological(5, 2, seed=0), Continuous(5, by=0, strength=0.5, seed=0)])
def test_a_seed_decides_the_draw(rule):
    dataset = labelled(100, 5)
    assert rule(dataset) == rule(dataset)
    assert type(rule)(**{**vars(rule), "seed": 1})(dataset) != rule(dataset)


def spread(dealt, feature):
    """Share of the feature's variance that lies between clients."""
    means = [feature[held].mean() for held in dealt.values()]
    return np.var(means) / np.var(feature)


def test_the_strength_of_a_continuous_partition_goes_from_random_to_sorted():
    feature = np.random.default_rng(0).standard_normal(2000)
    dataset = TensorDataset(torch.from_numpy(feature))
    found = [spread(Continuous(10, by=0, strength=s)(dataset), feature) for s in (0.0, 0.3, 0.6, 1.0)]
    assert found == sorted(found)
    assert found[0] < 0.02
    assert found[-1] > 0.9


@given(st.integers(1, 8), st.floats(0, 1), st.integers(8, 60), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_continuous_deals_every_sample_once_in_equal_parts(clients, strength, n, seed):
    dealt = Continuous(clients, by=[j % 3 for j in range(n)], strength=strength, seed=seed)(labelled(n, 2))
    assert indices(dealt) == list(range(n))
    assert max(map(len, dealt.values())) - min(map(len, dealt.values())) <= 1


def test_continuous_depends_on_ranks_only_and_mixes_ties():
    feature = torch.rand(50, dtype=torch.float64)
    plain, stretched = (Continuous(4, by=0, strength=0.7)(TensorDataset(x)) for x in (feature, feature**3 * 1e6))
    assert plain == stretched
    tied = Continuous(2, by=lambda sample: 1.0)(labelled(100, 2))
    assert tied[0] != list(range(50))


def test_continuous_follows_its_formula():
    from lightning_fed.core.randomness import numpy_generator

    v = np.array([3.0, 1.0, 1.0, 2.0, 9.0, 4.0])
    u = np.array([(np.sum(v < x) + np.sum(v <= x)) / (2 * len(v)) for x in v])
    e = numpy_generator(5, "Continuous").random(6)
    order = np.argsort(0.4 * u + 0.6 * e)
    dealt = Continuous(3, by=v, strength=0.4, seed=5)(labelled(6, 2))
    assert list(dealt.values()) == [sorted(part.tolist()) for part in np.split(order, 3)]


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Continuous(2, by=0, strength=1.5), r"Continuous.strength must be non-negative and at most 1, got 1.5"),
        (lambda: Continuous(2, by=None), r"Continuous.by must be an index"),
        (lambda: Continuous(2, by=[1.0])(labelled(4, 2)), r"Continuous.by has 1 numbers for 4 samples"),
        (lambda: Continuous(2, by=lambda s: "x")(labelled(4, 2)), r"one number per sample; sample 0 has 'x'"),
        (lambda: Continuous(2, by=[0, 1, np.nan, 2])(labelled(4, 2)), r"finite numbers; sample 2 has nan"),
        (lambda: Continuous(9, by=0)(labelled(4, 2)), r"Continuous needs at least 9 samples"),
        (lambda: Pathological(2, 0), r"Pathological.classes_per_client must be a whole number >= 1, got 0"),
        (lambda: Pathological(2)(TensorDataset(torch.rand(9))), r"Pathological deals classes, but the labels are real"),
    ],
)
def test_bad_arguments_are_refused(make, message):
    with pytest.raises(ValueError, match=message):
        make()


def by_parity(labels):
    return {f"client {p}": np.flatnonzero(labels % 2 == p) for p in (0, 1)}


@pytest.mark.parametrize(
    "function",
    [
        by_parity,
        lambda dataset: by_parity(labels_of(dataset)),
        lambda targets, seed: by_parity(targets),
        lambda y, extra=None: by_parity(y),
        partial(lambda labels, by: {k: torch.from_numpy(v) for k, v in by(labels).items()}, by=by_parity),
    ],
)
def test_a_function_may_take_labels_or_the_dataset(function):
    data = FederatedDataModule.from_dataset(labelled(12, 4), function)
    assert data.client_ids == ["client 0", "client 1"]
    assert data.client_dataset("client 1").indices == [1, 3, 5, 7, 9, 11]


def test_a_function_gets_the_randomness_that_it_names():
    kinds = []
    rules = [
        lambda dataset, seed: [kinds.append(type(seed)) or np.random.default_rng(seed).permutation(6)],
        lambda dataset, rng: [kinds.append(type(rng)) or rng.permutation(6)],
        lambda dataset, generator: [kinds.append(type(generator)) or torch.randperm(6, generator=generator)],
    ]
    for rule in rules:
        first, again, other = (as_partitioner(rule, seed)(labelled(6, 2)) for seed in (0, 0, 1))
        assert first == again != other
    assert set(kinds) == {int, np.random.Generator, torch.Generator}


def test_a_partitioner_stays_what_it_is():
    assert as_partitioner(IID(3)) == IID(3)
    assert as_partitioner(as_partitioner(by_parity)) == as_partitioner(by_parity)


@pytest.mark.parametrize(
    ("dealt", "message"),
    [
        ([[0, 1], [1]], "sample 1 more than once"),
        ([[0, 6]], "indices 0 to 6; the dataset has 0 to 5"),
        ([[0], []], r"no samples to client 1 \(1 of 2 clients\)"),
        ([], "names no clients"),
        ({0.5: [1]}, "A client of the partition must be a whole number or a string, got 0.5"),
        (np.arange(3), r"must give client 0 a list of whole numbers; it gave int64 of shape \(\)"),
        ([np.ones(6, dtype=bool)], r"it gave bool of shape \(6,\).*flatnonzero"),
        ([[0.5]], "it gave float64"),
        (None, "it returned a NoneType"),
    ],
)
def test_what_a_function_deals_is_checked(dealt, message):
    with pytest.raises((ValueError, TypeError), match=message):
        FederatedDataModule.from_dataset(labelled(6, 2), lambda dataset: dealt)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda dataset, clients: [], "it also wants clients.*functools.partial"),
        (lambda dataset, *, clients: [], "it also wants clients"),
        (lambda: [], "it takes no positional argument"),
        ("IID", r"partition must be a Partition such as IID\(clients=10\), or a function.*got 'IID'"),
        (IID, r"partition must be a Partition such as IID\(clients=10\)"),
    ],
)
def test_a_function_with_other_arguments_is_refused(function, message):
    with pytest.raises(TypeError, match=message):
        as_partitioner(function)
