"""Clients' data: who has what, in which order it comes, and what is refused."""

import itertools

import pytest
import torch
from helpers.modules import quiet_trainer
from torch.utils.data import DataLoader, Dataset, IterableDataset, Subset, TensorDataset

from lightning_fed.data import FederatedDataModule
from lightning_fed.data.tensor_loader import TensorLoader, in_memory
from lightning_fed.models import MLP
from lightning_fed.partition import IID, ByKey, Sizes


def numbers(n, start=0):
    return TensorDataset(torch.arange(start, start + n), torch.zeros(n))


class Slow(Dataset):
    """The same samples as a dataset in memory, but not in memory."""

    def __init__(self, dataset):
        self.dataset = dataset

    def __getitem__(self, index):
        return self.dataset[index]

    def __len__(self):
        return len(self.dataset)


def order(loader):
    return [batch[0].tolist() for batch in loader]


def generator(seed=0):
    return torch.Generator().manual_seed(seed)


def test_clients_come_in_the_order_given():
    data = FederatedDataModule({"z": numbers(3), 4: numbers(2), "a": numbers(1)})
    assert data.client_ids == ["z", 4, "a"]
    assert [data.num_examples(cid) for cid in data.client_ids] == [3, 2, 1]


def test_clients_of_a_sequence_are_numbered():
    data = FederatedDataModule([numbers(3), numbers(2)], test=[numbers(1)])
    assert data.client_ids == [0, 1]
    assert len(data.client_dataset(0, "test")) == 1
    assert [data.has_split(split) for split in ("train", "val", "test")] == [True, False, True]


def test_pairs_name_their_clients():
    data = FederatedDataModule([("b", numbers(3)), (7, numbers(2)), ("7", [1.0, 2.0])], test=[(7, numbers(1))])
    assert data.client_ids == ["b", 7, "7"]
    assert [data.num_examples(cid) for cid in data.client_ids] == [3, 2, 2]
    assert data.split_ids("test") == [7]


@pytest.mark.parametrize(
    ("pairs", "error", "message"),
    [
        ([("a", numbers(1)), ("a", numbers(2))], ValueError, "Client 'a' has two datasets in train"),
        ([(3, numbers(1)), ("3", numbers(1)), (3, [1, 2])], ValueError, "Client 3 has two datasets in train"),
        ([("a", numbers(1)), numbers(2)], TypeError, "mixes pairs .* item 1 is a TensorDataset"),
        ([numbers(2), ("a", numbers(1))], TypeError, "mixes pairs .* item 0 is a TensorDataset"),
        ([(1.5, numbers(1))], TypeError, "Client ids are whole numbers or strings, got 1.5"),
        ([(True, numbers(1))], TypeError, "Client ids are whole numbers or strings, got True"),
        ([([1], numbers(1))], TypeError, r"Client ids are whole numbers or strings, got \[1\]"),
    ],
)
def test_wrong_pairs_are_refused_by_name(pairs, error, message):
    with pytest.raises(error, match=message):
        FederatedDataModule(pairs)


def test_a_dataset_that_is_a_tuple_of_two_samples_is_no_pair():
    x = torch.zeros(2)
    data = FederatedDataModule([(x, x), ((x, 0), (x, 1)), ("some", "words"), (1, 2)])
    assert data.client_ids == [0, 1, 2, 3]
    assert [data.num_examples(cid) for cid in data.client_ids] == [2, 2, 2, 2]


@pytest.mark.parametrize("workers", [0, 1])
@pytest.mark.parametrize("wrap", [lambda d: d, Slow])
def test_the_order_of_a_clients_batches_depends_on_the_generator_only(wrap, workers):
    data = FederatedDataModule([wrap(numbers(20))], batch_size=3, loader_options={"num_workers": workers})
    torch.manual_seed(1)
    first = order(data.client_dataloader(0, generator(5)))
    torch.manual_seed(2)
    assert order(data.client_dataloader(0, generator(5))) == first
    assert order(data.client_dataloader(0, generator(6))) != first
    assert sorted(itertools.chain(*first)) == list(range(20))
    assert [len(batch) for batch in first] == [3] * 6 + [2]


@pytest.mark.parametrize("workers", [0, 1])
def test_the_order_is_the_same_in_memory_and_through_a_dataloader(workers):
    fast = FederatedDataModule([numbers(20)], batch_size=3)
    slow = FederatedDataModule([Slow(numbers(20))], batch_size=3, loader_options={"num_workers": workers})
    assert isinstance(fast.client_dataloader(0), TensorLoader)
    assert isinstance(slow.client_dataloader(0), DataLoader)
    assert order(fast.client_dataloader(0, generator())) == order(slow.client_dataloader(0, generator()))


@pytest.mark.parametrize("wrap", [lambda d: d, Slow])
def test_without_a_generator_the_order_follows_the_global_seed(wrap):
    data = FederatedDataModule([wrap(numbers(20))], batch_size=3)
    torch.manual_seed(1)
    first = order(data.client_dataloader(0))
    torch.manual_seed(1)
    assert order(data.client_dataloader(0)) == first


@pytest.mark.parametrize("wrap", [lambda d: d, Slow])
def test_a_client_loader_can_be_iterated_again_in_a_new_order(wrap):
    loader = FederatedDataModule([wrap(numbers(20))], batch_size=20).client_dataloader(0, generator())
    first, second = order(loader)[0], order(loader)[0]
    assert first != second
    assert sorted(first) == sorted(second)


@pytest.mark.parametrize("wrap", [lambda d: d, Slow])
def test_a_client_loader_may_leave_the_order_alone(wrap):
    data = FederatedDataModule([wrap(numbers(5))], batch_size=2)
    assert order(data.client_dataloader(0, generator(), shuffle=False)) == [[0, 1], [2, 3], [4]]


@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize("n", [6, 7])
def test_a_tensor_loader_collates_and_counts_as_a_dataloader_does(n, drop_last):
    dataset = TensorDataset(torch.randn(n, 2, 2), torch.arange(n))
    ours = TensorLoader(dataset.tensors, batch_size=3, drop_last=drop_last)
    theirs = DataLoader(dataset, batch_size=3, drop_last=drop_last)
    assert len(ours) == len(theirs) == len(list(ours))
    for a, b in zip(ours, theirs, strict=True):
        assert type(a) is type(b)
        assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_batches_are_copies_so_that_changing_one_leaves_the_data_alone():
    dataset = numbers(4)
    for batch in FederatedDataModule([dataset]).client_eval_dataloader(0, "train"):
        batch[0].zero_()
    assert dataset.tensors[0].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("indices", [[2, 0], range(0, 4, 2), torch.tensor([3, 1])])
def test_subsets_of_subsets_in_memory_are_indexed_directly(indices):
    dataset = Subset(Subset(numbers(9), [8, 6, 4, 2]), indices)
    loader = FederatedDataModule([dataset]).client_eval_dataloader(0, "train")
    assert isinstance(loader, TensorLoader)
    assert order(loader) == [[int(dataset[i][0]) for i in range(2)]]


def test_datasets_that_change_their_samples_are_not_bypassed():
    class Doubled(TensorDataset):
        def __getitem__(self, index):
            return (2 * self.tensors[0][index],)

    dataset = Doubled(torch.arange(3))
    assert in_memory(dataset) is None
    assert in_memory(Subset(dataset, [0])) is None
    assert order(FederatedDataModule([dataset]).client_eval_dataloader(0, "train")) == [[0, 2, 4]]


@pytest.mark.parametrize("wrap", [lambda d: d, Slow])
def test_evaluation_batches_keep_order_and_everything(wrap):
    data = FederatedDataModule(
        [wrap(numbers(3))], val=[wrap(numbers(5, start=10))], batch_size=3, eval_batch_size=2, drop_last=True
    )
    assert order(data.client_eval_dataloader(0, "val")) == [[10, 11], [12, 13], [14]]


@pytest.mark.parametrize("wrap", [lambda d: d, Slow])
def test_drop_last_leaves_out_the_short_batch(wrap):
    data = FederatedDataModule([wrap(numbers(7))], batch_size=3, drop_last=True)
    loader = data.client_dataloader(0)
    assert len(loader) == len(list(loader)) == 2


def test_pooled_loaders_hold_the_samples_of_all_clients():
    data = FederatedDataModule(
        [numbers(3), numbers(4, start=3)],
        val=[numbers(2, start=20)],
        test=[numbers(1, 30), numbers(2, 31)],
        batch_size=2,
    )
    train = order(data.train_dataloader())
    assert sorted(itertools.chain(*train)) == list(range(7))
    assert order(data.val_dataloader()) == [[20, 21]]
    assert order(data.test_dataloader()) == [[30, 31, 32]]


def test_validation_falls_back_to_the_test_data_and_then_to_nothing():
    assert order(FederatedDataModule([numbers(3)], test=[numbers(2)]).val_dataloader()) == [[0, 1]]
    assert FederatedDataModule([numbers(3)]).val_dataloader() == []


@pytest.mark.filterwarnings("ignore:.*does not have many workers")
@pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.")
@pytest.mark.filterwarnings("ignore:Total length of `list` across ranks is zero")
def test_a_plain_trainer_fits_without_validation_data():
    clients = [TensorDataset(torch.randn(5, 4), torch.zeros(5, dtype=torch.long)) for _ in range(2)]
    trainer = quiet_trainer(rounds=1)
    trainer.fit(MLP((4, 2)), datamodule=FederatedDataModule(clients, batch_size=4))
    assert trainer.global_step == 3  # 10 pooled samples
    assert "val_loss" not in trainer.callback_metrics


class Loaded(FederatedDataModule):
    def setup(self, stage=None):
        self.set_split("train", {"a": numbers(2), "b": numbers(3)})
        self.set_split("test", {"b": numbers(1)})


def test_a_subclass_may_load_its_data_in_setup():
    data = Loaded()
    with pytest.raises(ValueError, match=r"Loaded has no train data; it is empty: call setup\(\)"):
        _ = data.client_ids
    data.setup()
    data.setup()
    assert data.client_ids == ["a", "b"]
    assert data.split_ids("test") == ["b"]


def test_an_unknown_client_is_named_next_to_some_that_exist():
    data = FederatedDataModule([numbers(1)] * 5, val={1: numbers(1)})
    with pytest.raises(ValueError, match=r"Unknown client '3'. The federation has 5 clients: 0, 1, 2, \.\.\."):
        data.client_dataset("3")
    with pytest.raises(ValueError, match=r"Unknown client 9"):
        data.client_dataloader(9)
    with pytest.raises(ValueError, match=r"Client 0 has no val data. There are val data of 1 clients: 1\."):
        data.client_eval_dataloader(0, "val")


def test_unknown_and_missing_splits_are_told_apart():
    data = FederatedDataModule([numbers(1)])
    for call in (data.has_split, lambda s: data.client_dataset(0, s), lambda s: data.set_split(s, [numbers(1)])):
        with pytest.raises(ValueError, match="Unknown split 'valid'; splits are train, val, test"):
            call("valid")
    with pytest.raises(ValueError, match="has no test data; it has train"):
        data.test_dataloader()


class Stream(IterableDataset):
    def __iter__(self):
        yield 0

    def __len__(self):
        return 1


class Endless(Dataset):
    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"train": []}, "no clients in train"),
        ({"train": [numbers(1)], "val": {}}, "no clients in val.*leave val out"),
        ({"train": {"a": numbers(1), "b": numbers(0)}}, r"Client 'b' has no train samples \(length 0\)"),
        ({"train": [numbers(1)], "test": [numbers(0)]}, "Client 0 has no test samples"),
        ({"train": [numbers(1)], "test": {1: numbers(1)}}, "Client 1 has test data, but no train data"),
        ({"test": [numbers(1)]}, "test data before train data"),
        (
            {"train": [numbers(1)], "batch_size": 0},
            r"FederatedDataModule.batch_size must be a whole number >= 1, got 0",
        ),
        ({"train": [numbers(1)], "eval_batch_size": 1.5}, r"eval_batch_size must be a whole number >= 1, got 1.5"),
        (
            {"train": [numbers(1)], "loader_options": {"num_workers": -1}},
            r"num_workers must be a whole number >= 0, got -1",
        ),
    ],
)
def test_values_that_cannot_work_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        FederatedDataModule(**arguments)


@pytest.mark.parametrize(
    ("train", "message"),
    [
        ({"s": Stream()}, "train data of client 's' is an IterableDataset"),
        ([Endless()], "train data of client 0 must be a map-style Dataset"),
        ([DataLoader(numbers(3))], "must be a map-style Dataset.*got DataLoader"),
        (numbers(3), "got TensorDataset. FederatedDataModule.from_dataset"),
        ("mnist", "got str"),
        ({0.5: numbers(1)}, "Client ids are whole numbers or strings, got 0.5"),
    ],
)
def test_things_that_are_no_federation_are_refused_at_once(train, message):
    with pytest.raises(TypeError, match=message):
        FederatedDataModule(train)


def test_a_refused_split_leaves_the_module_as_it_was():
    data = FederatedDataModule({"a": numbers(2), "b": numbers(1)}, test={"b": numbers(1)})
    with pytest.raises(ValueError, match="Client 'b' has test data, but no train data"):
        data.set_split("train", {"a": numbers(5)})
    assert data.client_ids == ["a", "b"]
    assert data.num_examples("a") == 2


def test_one_dataset_becomes_a_federation():
    data = FederatedDataModule.from_dataset(
        numbers(100), IID(4), test_fraction=0.2, val_fraction=0.1, batch_size=5, eval_batch_size=7
    )
    assert data.client_ids == [0, 1, 2, 3]
    assert (data.batch_size, data.eval_batch_size) == (5, 7)
    sizes = [[len(data.client_dataset(cid, split)) for split in ("train", "val", "test")] for cid in data.client_ids]
    assert sizes == [[18, 2, 5]] * 4
    loaders = (data.train_dataloader(), data.val_dataloader(), data.test_dataloader())
    assert sorted(i for loader in loaders for batch in order(loader) for i in batch) == list(range(100))
    assert isinstance(data.client_dataloader(0), TensorLoader)


def test_what_is_held_out_depends_on_the_seed_only():
    def test_samples(seed):
        return order(
            FederatedDataModule.from_dataset(numbers(60), IID(2), test_fraction=0.3, seed=seed).test_dataloader()
        )

    assert test_samples(1) == test_samples(1)
    assert test_samples(1) != test_samples(2)


def test_clients_with_one_sample_only_train():
    data = FederatedDataModule.from_dataset(numbers(4), Sizes([1, 3]), test_fraction=0.01)
    assert [data.num_examples(cid) for cid in data.client_ids] == [1, 2]
    assert data.split_ids("test") == [1]
    with pytest.raises(ValueError, match="no client has a sample to spare for test"):
        FederatedDataModule.from_dataset(numbers(2), ByKey(["a", "b"]), test_fraction=0.5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"test_fraction": 1.0}, r"test_fraction must lie in \[0, 1\), got 1.0"),
        ({"val_fraction": -0.1}, r"val_fraction must lie in \[0, 1\), got -0.1"),
        ({"test_fraction": 0.5, "val_fraction": 0.5}, "stay below 1"),
        ({"test_fraction": 0.5, "test": [numbers(1)]}, "both test= and test_fraction=0.5"),
    ],
)
def test_fractions_that_cannot_work_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        FederatedDataModule.from_dataset(numbers(9), IID(2), **arguments)


def test_a_partition_of_ones_own_is_checked():
    with pytest.raises(ValueError, match="more than once"):
        FederatedDataModule.from_dataset(numbers(3), lambda dataset: {"a": [0, 1], "b": [1, 2]})
    with pytest.raises(ValueError, match="no samples to client 'b'"):
        FederatedDataModule.from_dataset(numbers(3), lambda dataset: {"a": [0, 1], "b": []}, test_fraction=0.5)


def test_a_validation_share_is_taken_from_the_training_data_of_every_client() -> None:
    whole = FederatedDataModule({"a": numbers(20), "b": numbers(7), "c": numbers(1)}, test={"a": numbers(3)})
    data = FederatedDataModule(whole.splits["train"], test=whole.splits["test"], val=0.2)
    assert {cid: data.num_examples(cid) for cid in data.client_ids} == {"a": 16, "b": 6, "c": 1}
    assert data.split_ids("val") == ["a", "b"]  # a single sample is trained on
    held = {split: [float(x[0]) for x in data.client_dataset("a", split)] for split in ("train", "val")}
    assert sorted(held["train"] + held["val"]) == [float(x[0]) for x in whole.client_dataset("a")]
    assert len(data.client_dataset("a", "test")) == 3


def test_a_validation_share_depends_on_the_client_and_its_number_of_samples_alone() -> None:
    def held(**clients: int) -> list[int]:
        data = FederatedDataModule({cid: numbers(n) for cid, n in clients.items()}, val=0.3)
        return list(data.client_dataset("a", "val").indices)

    assert held(a=20) == held(b=9, a=20)
    assert held(a=20) != held(a=40)[:6]


@pytest.mark.parametrize("fraction", [-0.1, 1.0, "0.1", float("nan")])
def test_a_share_that_is_none_is_refused(fraction: object) -> None:
    with pytest.raises(ValueError, match=r"FederatedDataModule\.val_fraction must be non-negative and below 1"):
        FederatedDataModule({"a": numbers(4)}, val=fraction)
    if not isinstance(fraction, str):
        with pytest.raises(ValueError, match=r"must lie in \(0, 1\)"):
            FederatedDataModule({"a": numbers(4)}).hold_out_validation(fraction)


def test_validation_data_and_a_share_are_refused_together() -> None:
    with pytest.raises(ValueError, match=r"Got both val data and val_fraction=0\.5"):
        FederatedDataModule({"a": numbers(4)}, val=0.5).set_split("val", {"a": numbers(2)})
    with pytest.raises(ValueError, match="no client has a sample to spare"):
        FederatedDataModule({"a": numbers(1)}, val=0.5)
