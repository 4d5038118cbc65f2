"""The batches of stacked clients are those that their loaders give, wherever the samples lie."""

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.local import plan
from lightning_fed.local.functional import UnfitError
from lightning_fed.local.plan import Blocks, Plan, Samples
from lightning_fed.randomness import derive_seed, derive_seeds
from lightning_fed.visit import Visit, local_epochs


class _Trainer:
    """What planning looks at."""

    def __init__(self, data, overfit_batches=0.0):
        self.datamodule, self.overfit_batches = data, overfit_batches
        self.limit_train_batches = overfit_batches or 1.0


class _Server:
    def __init__(self, local_steps=None, local_epochs=None):
        self.seed, self.local_steps, self.local_epochs = 5, local_steps, local_epochs


class _Halves(FederatedDataModule):
    """Every other epoch sees half of the data."""

    calls = 0

    def client_dataloader(self, cid, generator=None, *, shuffle=True):
        loader = super().client_dataloader(cid, generator, shuffle=shuffle)
        self.calls += 1
        loader.rows = torch.arange(len(loader.tensors[0]) // (1 + self.calls % 2))
        return loader


def _datasets(sizes=(9, 12, 9, 30)):
    numbers = torch.arange(sum(sizes)).double()
    return [TensorDataset(part, -part.long()) for part in numbers.split(sizes)]


def _subsets():
    whole = TensorDataset(torch.arange(40.0).double(), -torch.arange(40))
    return [Subset(whole, list(range(i, 40, 4))) for i in range(4)]


def _by_loaders(trainer, server, visit):
    batches = []
    for loader, count in local_epochs(trainer, server, visit):
        batches += [batch for batch, _ in zip(loader, range(count), strict=False)]
    return batches


CASES = {
    "steps": ({}, {"local_steps": 11}, 0.0),
    "one short epoch": ({}, {"local_epochs": 1}, 0.0),
    "epochs": ({}, {"local_epochs": 3}, 0.0),
    "no short batches": ({"drop_last": True}, {"local_steps": 9}, 0.0),
    "overfitting": ({}, {"local_steps": 5}, 2),
}


@pytest.mark.parametrize("kind", [FederatedDataModule, _Halves])
@pytest.mark.parametrize("datasets", [_datasets, _subsets])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_bytes", [2**23, 400])
def test_batches_of_a_stack_are_those_of_the_loaders(kind, datasets, case, block_bytes, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_BYTES", block_bytes)
    options, limits, overfit = CASES[case]
    server = _Server(**limits)
    visits = [Visit(3, cid, 0, 4, work=work) for cid, work in enumerate((1.0, 0.5, 1.0, 1.0))]
    trainer = _Trainer(kind(datasets(), batch_size=4, **options), overfit)
    expected = [_by_loaders(trainer, server, visit) for visit in visits]
    trainer = _Trainer(kind(datasets(), batch_size=4, **options), overfit)
    plans = Plan.all_of(trainer, server, visits)
    assert [p.steps for p in plans] == [visit.planned for visit in visits] == [len(own) for own in expected]
    done = 0
    for block in Blocks(plans, 6, lambda batch: batch, torch.zeros(1).double()):
        for t in range(block.steps):
            for i, own in enumerate(expected):
                size = int(block.sizes[t, i])
                assert size == (len(own[done + t][0]) if done + t < len(own) else 0)
                for found, part in zip(block.batch(t), own[done + t] if size else (), strict=False):
                    assert torch.equal(found[i, :size], part)
                assert block.weights[t, i, :size].sum() == pytest.approx(float(size > 0))
                assert not block.weights[t, i, size:].any()
            assert not block.weights[t, 4:].any()
        done += block.steps
    assert done == max(len(own) for own in expected)


def test_one_visit_is_planned_as_among_others():
    trainer, server = _Trainer(FederatedDataModule(_datasets(), batch_size=4)), _Server(local_steps=9)
    together = Plan.all_of(trainer, server, [Visit(1, cid, 0, 4) for cid in range(4)])
    for cid, among in enumerate(together):
        alone = Plan.of(trainer, server, Visit(1, cid, 0, 1))
        assert torch.equal(alone.rows, among.rows)
        assert alone.sizes.tolist() == among.sizes.tolist()


def test_data_that_are_no_tensors_cannot_be_planned():
    trainer = _Trainer(FederatedDataModule([[1, 2, 3]], batch_size=2))
    with pytest.raises(UnfitError, match="client 0 are not tensors in memory"):
        Plan.all_of(trainer, _Server(local_steps=1), [Visit(0, 0, 0, 1)])


def test_samples_are_pooled_only_where_that_takes_less_memory():
    sources = [[torch.arange(10.0)], [torch.arange(10.0, 20.0)]]
    few, many = torch.tensor([[[3, 1]], [[0, 9]]]), torch.arange(10).expand(2, 1, 10)
    assert len(Samples.of(sources, few).sources) == 2
    assert Samples.of(sources, few).take(slice(0, 1))[0].tolist() == [3, 1, 10, 19]
    assert len(Samples.of(sources, many).sources) == 1
    assert Samples.of(sources, many).take(slice(0, 1))[0].tolist() == list(range(20))
    shared = [sources[0], sources[0]]
    assert Samples.of(shared, few).sources[0][0] is sources[0][0]


@pytest.mark.parametrize("rows", [torch.tensor([[[3, 1]], [[0, 2]]]), torch.arange(4).expand(2, 1, 4).repeat(1, 2, 1)])
def test_clients_may_share_inputs_and_not_labels(rows):
    inputs, labels = torch.arange(4.0), [torch.arange(4), 10 + torch.arange(4)]
    taken = Samples.of([[inputs, labels[0]], [inputs, labels[1]]], rows).take(slice(0, 1))
    assert taken[0].tolist() == rows[:, 0].flatten().tolist()
    assert taken[1].tolist() == [*rows[0, 0].tolist(), *(10 + rows[1, 0]).tolist()]


def test_samples_of_different_kinds_do_not_share_a_stack():
    rows = torch.zeros(2, 1, 1, dtype=torch.int64)
    for other in (torch.zeros(3, 2), torch.zeros(3).double()):
        with pytest.raises(UnfitError, match="different shapes or types"):
            Samples.of([[torch.zeros(3)], [other]], rows)


def test_memory_for_batches_is_used_again_but_not_kept_if_it_is_much(monkeypatch):
    samples = Samples.of([[torch.arange(10.0)]], torch.zeros(1, 2, 5, dtype=torch.int64))
    with torch.inference_mode():
        first = samples.take(slice(0, 1))[0].data_ptr()
    assert samples.take(slice(1, 2))[0].data_ptr() == first  # written outside of inference mode, too
    monkeypatch.setattr(plan, "BLOCK_BYTES", 8)
    monkeypatch.setattr(plan, "_scratch", plan._Scratch())
    samples.take(slice(0, 2))
    assert not plan._scratch._kept


def test_seeds_of_a_row_are_the_seeds_of_its_keys():
    for key in ((0,), (3, 7, "ann"), (3, 2**70, "b\"o'b"), (1, "é")):
        assert derive_seeds(*key, count=3, last="batches") == [derive_seed(*key, i, "batches") for i in range(3)]
