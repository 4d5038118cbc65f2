"""Every sample has one owner, who is always the same for the same seed."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import ConcatDataset, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.partition import IID, ByKey, Dirichlet, Shards, Sizes, check_dealt, hold_out, labels_of


def labelled(n, classes=3):
    return TensorDataset(torch.arange(n), torch.arange(n) % classes)


class Samples(Dataset):
    """A map-style dataset without tensors or targets."""

    def __init__(self, samples):
        self.samples = samples

    def __getitem__(self, index):
        return self.samples[index]

    def __len__(self):
        return len(self.samples)


def indices(dealt):
    return sorted(index for held in dealt.values() for index in held)


@st.composite
def federations(draw):
    clients = draw(st.integers(1, 8))
    seed = draw(st.integers(0, 2**40))
    n = draw(st.integers(3 * clients, 120))
    rule = draw(
        st.sampled_from(
            [
                IID(clients, seed),
                Dirichlet(clients, draw(st.floats(1, 1e4)), seed),
                Shards(clients, draw(st.integers(1, 3)), seed),
            ]
        )
    )
    return rule, labelled(n, draw(st.integers(1, 10)))


@given(federations())
@settings(max_examples=60, deadline=None)
def test_every_index_is_dealt_exactly_once_and_nobody_is_left_empty(federation):
    rule, dataset = federation
    dealt = rule(dataset)
    assert list(dealt) == list(range(rule.clients))
    assert indices(dealt) == list(range(len(dataset)))
    assert all(dealt.values())


@given(federations())
@settings(max_examples=30, deadline=None)
def test_the_same_rule_deals_the_same_hands(federation):
    rule, dataset = federation
    np.random.seed(1)
    first = rule(dataset)
    np.random.seed(2)
    assert rule(dataset) == first


@pytest.mark.parametrize(
    "rule", [IID, lambda clients, seed: Dirichlet(clients, 1.0, seed), lambda c, s: Shards(c, 2, s)]
)
def test_another_seed_deals_other_hands(rule):
    assert rule(5, 0)(labelled(100)) != rule(5, 1)(labelled(100))


@given(st.integers(1, 6), st.floats(0.5, 100), st.integers(1, 8), st.integers(0, 1000))
@settings(max_examples=40, deadline=None)
def test_dirichlet_gives_everyone_the_minimum(clients, alpha, minimum, seed):
    dealt = Dirichlet(clients, alpha, seed, min_examples=minimum)(labelled(200))
    assert min(map(len, dealt.values())) >= minimum


def test_dirichlet_with_classes_smaller_than_the_federation_still_serves_everyone():
    dealt = Dirichlet(clients=7, alpha=61.0)(labelled(21, classes=10))
    assert all(dealt.values())


def test_dirichlet_says_so_when_no_draw_gives_everyone_enough():
    with pytest.raises(ValueError, match=r"fewer than 10 of 100 samples in each of 1000 draws.*larger alpha"):
        Dirichlet(clients=10, alpha=0.01, min_examples=10)(labelled(100))


def test_dirichlet_with_a_large_alpha_is_nearly_even_and_with_a_small_one_is_not():
    labels = torch.arange(4000) % 4

    def shares(alpha):
        dealt = Dirichlet(clients=4, alpha=alpha)(TensorDataset(labels))
        return np.array([np.bincount(labels[held], minlength=4) / 1000 for held in dealt.values()])

    assert np.abs(shares(1e5) - 0.25).max() < 0.01
    assert shares(0.05).max() > 0.9


def test_dirichlet_refuses_labels_that_are_not_classes():
    with pytest.raises(ValueError, match="labels are real numbers"):
        Dirichlet(clients=2, alpha=1.0)(TensorDataset(torch.rand(9)))
    assert indices(Dirichlet(clients=2, alpha=1.0)(TensorDataset(torch.ones(9)))) == list(range(9))


def test_iid_sizes_differ_by_one_at_most():
    sizes = [len(held) for held in IID(7)(labelled(30)).values()]
    assert sum(sizes) == 30
    assert max(sizes) - min(sizes) <= 1


def test_shards_give_each_client_few_labels():
    dealt = Shards(clients=5, shards_per_client=2)(labelled(100, classes=10))
    assert all(len({index % 10 for index in held}) == 2 for held in dealt.values())


@given(st.lists(st.integers(1, 9), min_size=1, max_size=6), st.integers(0, 20), st.integers(0, 9))
@settings(max_examples=40, deadline=None)
def test_sizes_are_the_sizes_asked_for_and_the_rest_is_left_out(sizes, rest, seed):
    dealt = Sizes(sizes, seed)(labelled(sum(sizes) + rest))
    assert [len(held) for held in dealt.values()] == sizes
    assert len(set(indices(dealt))) == sum(sizes)


@pytest.mark.parametrize(
    "key",
    [
        1,
        -1,
        lambda sample: int(sample[1]),
        [5, 6, 5, 6],
        torch.tensor([5, 6, 5, 6]),
        np.array([5, 6, 5, 6]),
    ],
)
@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: Samples([d[i] for i in range(len(d))])])
def test_a_key_may_be_an_index_a_function_or_one_client_per_sample(key, wrap):
    dataset = TensorDataset(torch.zeros(4, 2), torch.tensor([5, 6, 5, 6]))
    dealt = ByKey(key)(wrap(dataset))
    assert dealt == {5: [0, 2], 6: [1, 3]}
    assert all(type(cid) is int for cid in dealt)


def test_a_key_may_be_the_name_of_an_entry():
    assert ByKey("who")(Samples([{"who": "b"}, {"who": "a"}, {"who": "b"}])) == {"b": [0, 2], "a": [1]}


@pytest.mark.parametrize(
    ("key", "message"),
    [
        (5, r"ByKey.key is 5, but samples have no such entry"),
        ("who", r"ByKey.key is 'who', but samples have no such entry"),
        (["a", "b"], "has 2 clients for 4 samples"),
        ([0.5, 1, 1, 1], "key of sample 0 must be a whole number or a string, got 0.5"),
        (0, "key of sample 0 must be a whole number or a string, got \\["),
    ],
)
def test_a_key_that_does_not_fit_is_refused(key, message):
    with pytest.raises(ValueError, match=message):
        ByKey(key)(TensorDataset(torch.zeros(4, 2), torch.zeros(4)))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: IID(0), r"IID.clients must be a whole number >= 1, got 0"),
        (lambda: IID(2.0), r"IID.clients must be a whole number >= 1, got 2.0"),
        (lambda: IID(2, seed="x"), r"IID.seed must be a whole number, got 'x'"),
        (lambda: Dirichlet(3, 0.0), r"Dirichlet.alpha must be positive, got 0.0"),
        (lambda: Dirichlet(3, 1.0, min_examples=0), r"Dirichlet.min_examples must be a whole number >= 1, got 0"),
        (lambda: Shards(3, 0), r"Shards.shards_per_client must be a whole number >= 1, got 0"),
        (lambda: Sizes([]), "at least one client"),
        (lambda: Sizes([3, 0]), "got 0 for client 1"),
        (lambda: ByKey(None), "ByKey.key must be an index"),
    ],
)
def test_bad_arguments_are_refused_at_once(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("rule", [IID(9), Dirichlet(3, 1.0, min_examples=3), Shards(4, 2), Sizes([4, 4])])
def test_too_few_samples_are_refused_with_the_number_that_is_needed(rule):
    with pytest.raises(ValueError, match=rf"{type(rule).__name__} needs at least [89] samples .* has 7"):
        rule(labelled(7))


@pytest.mark.parametrize("rule", [IID(1), Dirichlet(1, 1.0), Shards(1), Sizes([1]), ByKey(0)])
def test_a_stream_cannot_be_partitioned(rule):
    class Stream(IterableDataset):
        def __iter__(self):
            yield 0

    with pytest.raises(TypeError, match="the dataset is an IterableDataset"):
        rule(Stream())


def test_labels_are_found_without_reading_samples_where_possible():
    class Images(Samples):
        targets = (4, 5, 6)

        def __getitem__(self, index):
            raise AssertionError("read a sample")

    tensors = TensorDataset(torch.zeros(2, 3), torch.tensor([1, 2]))
    both = ConcatDataset([tensors, Subset(Images([0, 0, 0]), [2, 0])])
    assert labels_of(both).tolist() == [1, 2, 6, 4]


@pytest.mark.parametrize(
    "samples",
    [[(0.0, 2), (0.0, 1)], [{"label": 2}, {"label": 1}], [(0.0, torch.tensor(2)), (0.0, torch.tensor(1))]],
)
def test_labels_are_else_the_last_entry_of_a_sample(samples):
    assert labels_of(Samples(samples)).tolist() == [2, 1]


@pytest.mark.parametrize("sample", [torch.zeros(3), 0.5, {"y": 1}])
def test_a_sample_without_a_label_is_refused(sample):
    with pytest.raises(ValueError, match="Sample 0 has no label"):
        Shards(1, 1)(Samples([sample]))


def test_labels_with_several_entries_are_refused():
    with pytest.raises(ValueError, match=r"one label per sample, shape \(4,\); got .* of shape \(4, 2\)"):
        Shards(2)(TensorDataset(torch.zeros(4, 2)))


@given(st.integers(1, 40), st.floats(0, 0.49), st.floats(0, 0.49), st.integers(0, 99))
@settings(max_examples=60, deadline=None)
def test_held_out_samples_leave_something_to_train_on(n, test, val, seed):
    own = list(range(100, 100 + n))
    held = hold_out(own, {"test": test, "val": val}, np.random.default_rng(seed))
    assert indices(held) == own
    assert all(held.values())
    assert ("test" in held) == (test > 0 and n >= 2)
    assert ("val" in held) == (val > 0 and n - len(held.get("test", ())) >= 2)


@pytest.mark.parametrize(
    ("dealt", "message"),
    [
        ({0: [0, 1], 1: [1]}, "sample 1 more than once"),
        ({0: [0, 3]}, "indices 0 to 3; the dataset has 0 to 2"),
        ({0: [-1]}, "indices -1 to -1"),
        ({}, "no clients"),
    ],
)
def test_a_wrong_partition_is_noticed(dealt, message):
    with pytest.raises(ValueError, match=message):
        check_dealt(dealt, 3)
