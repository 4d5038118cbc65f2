"""Collation, samplers and options of loaders: what they give, and what is refused."""

from __future__ import annotations

import itertools
import warnings
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, RandomSampler, TensorDataset, WeightedRandomSampler

from lightning_fed import FederatedDataModule
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.randomness import torch_generator
from lightning_fed.data.loading import counted, drawn_order, known_sizes
from lightning_fed.data.tensor_loader import TensorLoader
from lightning_fed.lightning import _warn_of_guess, batch_size_of
from lightning_fed.local.schedule import planned_steps, visit_loaders
from lightning_fed.local.stacked.batches import Plan
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.trainer.hooks import Visit
from lightning_fed.trainer.remedies import remedy_for


def numbers(n: int, start: int = 0) -> TensorDataset:
    return TensorDataset(torch.arange(start, start + n), torch.zeros(n))


def labelled(samples: list[Any]) -> dict[str, Any]:
    """A batch that no guess could count: its tensors have other lengths than it has samples."""
    return {"step": torch.tensor(7), "x": torch.stack([s[0] for s in samples]), "twice": torch.zeros(2 * len(samples))}


def backwards(dataset: Any, generator: torch.Generator) -> range:
    return range(len(dataset) - 1, -1, -1)


def run(data: FederatedDataModule, overfit: float = 0.0, limit: float = 1.0, **server: Any) -> tuple[Any, Any]:
    """What drawing looks at."""
    limit = overfit or limit
    trainer = SimpleNamespace(datamodule=data, overfit_batches=overfit, limit_train_batches=limit)
    return trainer, LocalWork(server.get("seed", 5), server.get("local_steps"), server.get("local_epochs"))


def drawn(data: FederatedDataModule, cid: Any = 0, round: int = 3, work: float = 1.0, **how: Any) -> list[list[Any]]:
    """The positions in each batch of each local epoch, in data whose samples are their positions."""
    trainer, server = run(data, **how)
    visit = Visit(round, cid, 0, 1, work=work)
    loaders = list(visit_loaders(trainer, server, visit, seed=False))
    assert visit.planned == sum(count for _, count in loaders) == sum(len(loader) for loader, _ in loaders)
    return [[batch[0].tolist() for batch in loader] for loader, _ in loaders]


# -- collate_fn -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("workers", [0, 1])
def test_every_loader_collates_by_collate_fn_also_tensors_in_memory(workers: int) -> None:
    data = FederatedDataModule(
        [numbers(5), numbers(3, 5)],
        test=[numbers(3)],
        batch_size=2,
        loader_options={"collate_fn": labelled, "num_workers": workers},
    )
    positions = [torch.tensor([3, 1])]
    loaders = [
        data.client_dataloader(0),
        data.batches_dataloader(0, positions),
        data.client_eval_dataloader(0, "test"),
        data.train_dataloader(),
        data.val_dataloader(),
        data.test_dataloader(),
    ]
    for loader in loaders:
        assert isinstance(loader, DataLoader)
        assert all(batch.keys() == {"step", "x", "twice"} for batch in loader)
    assert next(iter(loaders[1]))["x"].tolist() == [3, 1]
    assert sorted(torch.cat([batch["x"] for batch in loaders[3]]).tolist()) == list(range(8))


def test_a_subclass_may_write_them_as_methods() -> None:
    class Own(FederatedDataModule):
        def collate_fn(self, samples: list[Any]) -> list[Any]:  # type: ignore[override]
            return [torch.stack([a for a, _ in samples]), self]

        def sampler(self, dataset: Any, generator: torch.Generator) -> list[int]:  # type: ignore[override]
            return [4, 2]

    data = Own([numbers(5)], batch_size=2)
    assert next(iter(data.client_eval_dataloader(0, "train")))[1] is data
    assert drawn(data, local_epochs=1) == [[[4, 2]]]
    given = Own([numbers(5)], batch_size=5, sampler=backwards)
    assert drawn(given, local_epochs=1) == [[[4, 3, 2, 1, 0]]]


def test_batches_of_a_visit_are_those_without_collate_fn() -> None:
    plain = FederatedDataModule([numbers(7)], batch_size=3)
    options = {"collate_fn": lambda s: [torch.stack([a for a, _ in s])]}
    own = FederatedDataModule([numbers(7)], batch_size=3, loader_options=options)
    for how in ({"local_steps": 5}, {"local_epochs": 2}):
        assert drawn(own, **how) == drawn(plain, **how)


@pytest.mark.parametrize(
    ("arguments", "reason"),
    [({"loader_options": {"collate_fn": labelled}}, "collate_fn"), ({"sampler": backwards}, "sampler")],
)
def test_stacks_refuse_data_that_are_collated_or_ordered_otherwise(arguments: Any, reason: str) -> None:
    trainer, server = run(FederatedDataModule([numbers(5)], **arguments), local_steps=1)
    with pytest.raises(UnfitError, match=f"the data have a {reason} of their own"):
        Plan.all_of(trainer, server, [Visit(0, 0, 0, 1)])


def test_clients_with_a_loader_of_their_own_are_not_stacked() -> None:
    class Own(FederatedDataModule):
        def client_dataloader(self, cid: Any, generator: Any = None, *, shuffle: bool = True) -> Any:
            return self.batches_dataloader(cid, [torch.tensor([4, 4, 1]), torch.tensor([0])])

    trainer, server = run(Own([numbers(5)], batch_size=2), local_epochs=1)
    with pytest.raises(UnfitError, match="Own overrides client_dataloader"):
        Plan.all_of(trainer, server, [Visit(0, 0, 0, 1)])


# -- sampler ----------------------------------------------------------------------------------------------------------


def test_a_sampler_decides_the_order_of_every_epoch() -> None:
    for collate in (None, lambda samples: [torch.stack([a for a, _ in samples])]):
        data = FederatedDataModule(
            [numbers(5)], batch_size=2, sampler=backwards, loader_options={"collate_fn": collate}
        )
        assert drawn(data, local_epochs=2) == [[[4, 3], [2, 1], [0]]] * 2
        assert drawn(data, local_steps=4) == [[[4, 3], [2, 1], [0, 4]], [[3, 2]]]
        assert [b[0].tolist() for b in data.client_dataloader(0)] == [[4, 3], [2, 1], [0]]
        assert [b[0].tolist() for b in data.client_dataloader(0, shuffle=False)] == [[0, 1], [2, 3], [4]]


def test_limits_work_and_drop_last_hold_for_a_sampler() -> None:
    data = FederatedDataModule([numbers(5)], batch_size=2, sampler=backwards)
    assert drawn(data, local_epochs=3, limit=4) == [[[4, 3], [2, 1], [0]], [[4, 3]]]
    assert drawn(data, local_epochs=2, limit=0.5) == [[[4, 3], [2, 1], [0]]]
    assert drawn(data, local_steps=4, limit=0.5) == [[[4, 3], [2, 1]]]
    assert drawn(data, local_epochs=4, work=0.5) == [[[4, 3], [2, 1], [0]]] * 2
    assert drawn(data, local_steps=4, work=0.5) == [[[4, 3], [2, 1]]]
    assert planned_steps(*run(data, local_epochs=3), 0) == 9
    dropping = FederatedDataModule([numbers(5)], batch_size=2, sampler=backwards, drop_last=True)
    assert drawn(dropping, local_epochs=1) == [[[4, 3], [2, 1]]]
    assert len(dropping.client_dataloader(0)) == 2


def test_overfitting_takes_samples_as_they_are_stored() -> None:
    data = FederatedDataModule([numbers(5)], batch_size=2, sampler=backwards)
    assert drawn(data, overfit=1, local_steps=2) == [[[0, 1]], [[0, 1]]]


@pytest.mark.parametrize("length", [1, 2, 3, 7, 40])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_an_epoch_is_as_long_as_the_sampler_says(length: int, size: int) -> None:
    """Against one list of positions, cut by hand."""

    def some(dataset: Any, generator: torch.Generator) -> Tensor:
        return torch.randint(len(dataset), (length,), generator=generator)

    data = FederatedDataModule({"ann": numbers(5)}, batch_size=size, sampler=some)
    orders = [torch.randint(5, (length,), generator=key(epoch)).tolist() for epoch in range(60)]
    whole = [[order[i : i + size] for i in range(0, length, size)] for order in orders]
    assert drawn(data, "ann", local_epochs=3) == whole[:3]
    width, stream = min(size, length), list(itertools.chain(*orders))
    expected = [stream[t * width : (t + 1) * width] for t in range(6)]
    epochs = drawn(data, "ann", local_steps=6)
    assert list(itertools.chain(*epochs)) == expected
    begun = [t * width // length for t in range(6)]  # a batch belongs to the epoch in which it begins
    assert [len(batches) for batches in epochs] == [begun.count(epoch) for epoch in range(begun[-1] + 1)]


def key(epoch: int) -> torch.Generator:
    return torch_generator(5, 3, "ann", epoch, "sampler")


def test_epochs_may_have_different_lengths() -> None:
    lengths = itertools.cycle([1, 3, 1, 1, 5])
    data = FederatedDataModule([numbers(5)], batch_size=2, sampler=lambda d, g: range(next(lengths)), drop_last=True)
    assert drawn(data, local_epochs=5) == [[], [[0, 1]], [], [], [[0, 1], [2, 3]]]
    lengths = itertools.cycle([2, 1, 5])
    data = FederatedDataModule([numbers(5)], batch_size=2, sampler=lambda d, g: range(next(lengths)))
    assert drawn(data, local_steps=4) == [[[0, 1]], [[0, 0]], [[1, 2], [3, 4]]]


def test_draws_are_a_function_of_seed_round_client_and_epoch_alone() -> None:
    data = FederatedDataModule({c: numbers(20) for c in "ab"}, batch_size=5, sampler=balanced)
    first = drawn(data, "a", local_epochs=2)
    torch.manual_seed(99)
    assert drawn(data, "a", local_epochs=2) == first
    assert drawn(data, "a", local_epochs=1) == first[:1]
    assert first[0] != first[1]
    others = [drawn(data, "b", local_epochs=1), drawn(data, "a", round=4, local_epochs=1)]
    others.append(drawn(data, "a", seed=6, local_epochs=1))
    assert all(other[0] != first[0] for other in others)


def test_a_sampler_that_forgets_the_generator_is_reproducible_and_leaves_the_global_streams_alone() -> None:
    data = FederatedDataModule([numbers(20)], batch_size=5, sampler=lambda d, g: RandomSampler(d))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = drawn(data, local_epochs=2)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)
    assert drawn(data, local_epochs=2) == first
    assert first[0] != first[1]


def test_a_sampler_without_end_serves_local_steps() -> None:
    data = FederatedDataModule([numbers(5)], batch_size=2, sampler=lambda d, g: itertools.cycle([3, 1, 2]))
    assert drawn(data, local_steps=3) == [[[3, 1], [2, 3], [1, 2]]]


def balanced(dataset: Any, generator: torch.Generator) -> WeightedRandomSampler:
    return WeightedRandomSampler(torch.arange(1.0, len(dataset) + 1), 9, generator=generator)


def test_the_pool_has_the_samples_that_the_sampler_gives_for_each_client() -> None:
    def head(dataset: Any, generator: torch.Generator) -> list[int]:
        return [0, 0, len(dataset) - 1]

    data = FederatedDataModule([numbers(5), numbers(4, 5)], batch_size=4, sampler=head)
    torch.manual_seed(0)
    loader = data.train_dataloader()
    first, second = (list(itertools.chain(*(b[0].tolist() for b in loader))) for _ in range(2))
    assert sorted(first) == sorted(second) == [0, 0, 4, 5, 5, 8]
    assert first != second  # of 180 orders
    assert len(loader) == 2
    torch.manual_seed(0)
    assert list(itertools.chain(*(b[0].tolist() for b in data.train_dataloader()))) == first
    assert [b[0].tolist() for b in data.client_eval_dataloader(0, "train")] == [[0, 1, 2, 3, 4]]


def test_the_pool_has_no_length_where_a_sampler_has_none() -> None:
    data = FederatedDataModule([numbers(5)], batch_size=4, sampler=lambda d, g: iter([0, 1]))
    with pytest.raises(TypeError):
        len(data.train_dataloader())
    assert sorted(next(iter(data.train_dataloader()))[0].tolist()) == [0, 1]


@pytest.mark.parametrize("kind", [list, tuple, np.array, torch.tensor, iter])
def test_positions_come_in_any_iterable_of_whole_numbers(kind: Any) -> None:
    assert drawn_order(lambda d, g: kind([2, 0]), numbers(3), torch.Generator(), "ann") == [2, 0]


@pytest.mark.parametrize(
    ("given", "kind", "message"),
    [
        ([], ValueError, "sampler gave no samples for client 0, which has 5"),
        ([0, 5], ValueError, "sampler gave position 5 for client 0, whose samples are 0 to 4"),
        ([-1], ValueError, "sampler gave position -1 for client 0"),
        (None, TypeError, "sampler must give positions of samples.*it gave None for client 0"),
        (BatchSampler(range(5), 2, False), TypeError, r"not a BatchSampler or a mask\); it gave \[0, 1\]"),
        ([True, False], TypeError, "it gave True for client 0"),
        (torch.tensor([True, False]), TypeError, r"it gave tensor\(True\)"),
        ([0.0], TypeError, "it gave 0.0"),
    ],
)
def test_positions_that_are_none_are_refused(given: Any, kind: Any, message: str) -> None:
    data = FederatedDataModule([numbers(5)], batch_size=2, sampler=lambda d, g: given)
    for how in ({"local_epochs": 1}, {"local_steps": 3}):
        with pytest.raises(kind, match=message):
            drawn(data, **how)
    with pytest.raises(kind, match=message):
        data.client_dataloader(0)
    with pytest.raises(kind, match=message):
        next(iter(data.train_dataloader()))


def test_epochs_without_a_full_batch_are_refused() -> None:
    data = FederatedDataModule([numbers(9)], batch_size=4, drop_last=True, sampler=lambda d, g: [0, 1])
    with pytest.raises(ValueError, match="sampler gives less than one batch of 4 samples, and drop_last=True"):
        drawn(data, local_epochs=1)
    assert drawn(data, local_steps=1) == [[[0, 1]]]


# -- options ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "kind", "message"),
    [
        ({"loader_options": {"collate_fn": "pad"}}, TypeError, "collate_fn must be a function such as .*, got 'pad'"),
        ({"sampler": [0, 1]}, TypeError, r"sampler must be a function such as .*, got \[0, 1\]"),
        ({"loader_options": ["pin_memory"]}, TypeError, "loader_options must be a mapping"),
        (
            {"loader_options": {"pin_memry": True}},
            ValueError,
            "no option 'pin_memry'.*It has num_workers, coll",
        ),
        ({"loader_options": {"shuffle": True}}, ValueError, "cannot hold 'shuffle', which is set by sampler="),
        ({"loader_options": {"batch_size": 3}}, ValueError, "'batch_size', which is set by batch_size= and eval"),
        ({"loader_options": {"generator": None}}, ValueError, "'generator', which is set by the seed"),
        ({"loader_options": {"in_order": False}}, ValueError, "'in_order', which is set by the seed"),
        ({"loader_options": {"prefetch_factor": 2}}, ValueError, "'prefetch_factor': 2.*num_workers=0: prefetch"),
        ({"loader_options": {"persistent_workers": True}}, ValueError, "persistent_workers"),
    ],
)
def test_arguments_that_cannot_work_are_refused_at_once(arguments: Any, kind: Any, message: str) -> None:
    with pytest.raises(kind, match=message):
        FederatedDataModule([numbers(3)], **arguments)


def marked(worker: int) -> None:
    Marked.mark = worker  # in the worker, a process of its own


class Marked(torch.utils.data.Dataset):
    mark = -1

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[int, int]:
        return index, self.mark


def test_options_reach_every_loader() -> None:
    options = {
        "num_workers": 1,
        "worker_init_fn": marked,
        "prefetch_factor": 3,
        "timeout": 60,
        "multiprocessing_context": "fork",
    }
    data = FederatedDataModule([Marked()], test=[Marked()], batch_size=2, loader_options=options)
    pooled = [data.train_dataloader(), data.val_dataloader(), data.test_dataloader()]
    own = [data.client_dataloader(0), data.batches_dataloader(0, [torch.tensor([1])])]
    for loader in [*pooled, *own, data.client_eval_dataloader(0, "test")]:
        assert (loader.prefetch_factor, loader.timeout) == (3, 60)
        assert next(iter(loader))[1].tolist()[0] == 0
    dealt = FederatedDataModule.from_dataset(Marked(), lambda d: {"a": [0, 1, 2, 3]}, sampler=backwards)
    assert drawn(dealt, "a", local_epochs=1) == [[[3, 2, 1, 0]]]


# -- how many samples a batch has -------------------------------------------------------------------------------------


def opaque(samples: list[Any]) -> object:
    return object()


@pytest.mark.parametrize("drop", [False, True])
@pytest.mark.parametrize("collate", [None, opaque, labelled])
def test_loaders_know_how_many_samples_their_batches_have(drop: bool, collate: Any) -> None:
    data = FederatedDataModule(
        [numbers(7)],
        test=[numbers(5)],
        batch_size=3,
        eval_batch_size=2,
        drop_last=drop,
        loader_options={"collate_fn": collate},
    )
    full = [3, 3] + [1] * (not drop)
    assert known_sizes(data.client_dataloader(0)) == known_sizes(data.train_dataloader()) == full
    assert known_sizes(data.client_eval_dataloader(0, "test")) == known_sizes(data.test_dataloader()) == [2, 2, 1]
    assert known_sizes(data.batches_dataloader(0, [torch.tensor([1, 1]), torch.tensor([0])])) == [2, 1]
    assert [size for _, size in counted(data.client_dataloader(0))] == full


@pytest.mark.parametrize("batches", [None, [torch.tensor([4]), torch.tensor([1, 2, 3])]])
def test_a_tensor_loader_counts_what_it_gives(batches: Any) -> None:
    loader = TensorLoader([torch.arange(5)], batch_size=2, batches=batches)
    assert loader.sizes() == [len(batch[0]) for batch in loader]
    assert len(loader) == len(loader.sizes())


def test_loaders_that_may_give_anything_are_not_counted() -> None:
    class Lying(RandomSampler):
        def __len__(self) -> int:
            return 100

    class Doubling(DataLoader):
        def __iter__(self) -> Any:
            return iter([1, 1])

    assert known_sizes(DataLoader(numbers(4), sampler=Lying(numbers(4)))) is None
    assert known_sizes(Doubling(numbers(4))) is None
    assert known_sizes([1, 2]) is None
    assert [*counted([1, 2])] == [(1, None), (2, None)]


def test_a_guess_that_fails_says_so_once() -> None:
    _warn_of_guess.cache_clear()
    with pytest.warns(
        UserWarning, match=r"samples of a object from a loader of your own is not known: it has no tensor"
    ):
        assert batch_size_of(object()) == 1
    with pytest.warns(UserWarning, match="of a dict .* tensors of 1 and 2 and 4 rows; the first is taken"):
        assert batch_size_of(labelled([*numbers(2)])) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert batch_size_of(object()) == 1
        assert batch_size_of([torch.zeros(3, 2), {"y": torch.zeros(3)}]) == 3
    _warn_of_guess.cache_clear()


# -- remedies ---------------------------------------------------------------------------------------------------------


def test_the_remedy_is_for_the_error_that_torch_raises() -> None:
    with pytest.raises(ValueError, match="Expected more than 1") as raised:
        torch.nn.BatchNorm1d(3)(torch.zeros(1, 3))
    for word in ("one sample", "drop_last=True", "batch_size", "local_steps", "GroupNorm"):
        assert word in remedy_for(raised.value)
    assert remedy_for(ValueError("something else")) == remedy_for(RuntimeError("Expected more than 1")) == ""


def test_packed_sequences_reach_the_loop() -> None:
    ragged = [torch.ones(n) for n in (3, 1, 2)]
    options = {"collate_fn": lambda s: pack_sequence(s, enforce_sorted=False)}
    data = FederatedDataModule([ragged], batch_size=2, loader_options=options)
    trainer, server = run(data, local_epochs=1)
    (loader, count), *rest = visit_loaders(trainer, server, Visit(0, 0, 0, 1))
    assert (count, rest, known_sizes(loader)) == (2, [], [2, 1])
