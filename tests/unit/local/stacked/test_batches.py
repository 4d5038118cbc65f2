"""The batches of stacked clients are those that their loaders give, wherever the samples lie."""

import pytest
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.core.local_work import LocalWork
from lightning_fed.data.tensor_loader import TensorRows, row_by_row
from lightning_fed.local.schedule import visit_loaders
from lightning_fed.local.stacked import batches as plan
from lightning_fed.local.stacked.batches import Batches, Plan
from lightning_fed.local.stacked.pure_step import UnfitError
from lightning_fed.trainer.hooks import Visit


class _Trainer:
    """What planning looks at."""

    def __init__(self, data, overfit_batches=0.0):
        self.datamodule, self.overfit_batches = data, overfit_batches
        self.limit_train_batches = overfit_batches or 1.0


def _work(local_steps=None, local_epochs=None):
    return LocalWork(5, local_steps, local_epochs)


def _datasets(sizes=(9, 12, 9, 30)):
    numbers = torch.arange(sum(sizes)).double()
    return [TensorDataset(part, -part.long()) for part in numbers.split(sizes)]


def _subsets():
    whole = TensorDataset(torch.arange(40.0).double(), -torch.arange(40))
    return [Subset(whole, list(range(i, 40, 4))) for i in range(4)]


def _by_loaders(trainer, server, visit):
    batches = []
    for loader, count in visit_loaders(trainer, server, visit):
        batches += [batch for batch, _ in zip(loader, range(count), strict=False)]
    return batches


CASES = {
    "steps": ({}, {"local_steps": 11}, 0.0),
    "one short epoch": ({}, {"local_epochs": 1}, 0.0),
    "epochs": ({}, {"local_epochs": 3}, 0.0),
    "no short batches": ({"drop_last": True}, {"local_steps": 9}, 0.0),
    "overfitting": ({}, {"local_steps": 5}, 2),
}


@pytest.mark.parametrize("datasets", [_datasets, _subsets])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("block_bytes", [2**23, 400])
def test_batches_of_a_stack_are_those_of_the_loaders(datasets, case, block_bytes, monkeypatch):
    monkeypatch.setattr(plan, "BLOCK_BYTES", block_bytes)
    options, limits, overfit = CASES[case]
    server = _work(**limits)
    visits = [Visit(3, cid, 0, 4, work=work) for cid, work in enumerate((1.0, 0.5, 1.0, 1.0))]
    trainer = _Trainer(FederatedDataModule(datasets(), batch_size=4, **options), overfit)
    expected = [_by_loaders(trainer, server, visit) for visit in visits]
    plans = Plan.all_of(trainer, server, visits)
    assert [p.steps for p in plans] == [visit.planned for visit in visits] == [len(own) for own in expected]
    batches = [Batches([plan], lambda batch: batch, torch.zeros(1).double(), {}) for plan in plans]
    for own, plan_, taken in zip(expected, plans, batches, strict=True):
        for first in range(0, plan_.steps, taken.block):
            found = taken.take([slice(first, first + taken.block)])
            for t, batch in enumerate(own[first : first + taken.block]):
                size = int(plan_.sizes[first + t])
                assert [len(part) for part in batch] == [size, size]
                assert all(torch.equal(part[t, :size], whole) for part, whole in zip(found, batch, strict=True))


@pytest.mark.parametrize("datasets", [_datasets, _subsets])
def test_each_client_of_a_stack_may_be_at_another_step(datasets):
    trainer, server = _Trainer(FederatedDataModule(datasets(), batch_size=4)), _work(local_steps=9)
    plans = Plan.all_of(trainer, server, [Visit(1, cid, 0, 4) for cid in range(4)])
    steps = [slice(0, 2), slice(3, 3), slice(8, 9), slice(1, 4)]
    found = Batches(plans, lambda batch: batch, torch.zeros(1).double(), {}).take(steps)
    rows = [plan.tensors[0][plan.rows[part]] for plan, part in zip(plans, steps, strict=True)]
    assert torch.equal(found[0], torch.cat(rows))
    assert torch.equal(found[1], -torch.cat(rows).long())


@row_by_row
def _doubled(batch):
    return [2 * batch[0], batch[1]]


@pytest.mark.parametrize("limits", [{"local_steps": 9}, {"local_epochs": 2}], ids=["steps", "epochs"])
def test_a_transform_sees_the_batches_of_a_stack_as_those_of_a_loader(limits):
    data = [TensorRows(d.tensors, torch.arange(len(d)).flip(0), _doubled) for d in _datasets()]
    trainer, server = _Trainer(FederatedDataModule(data, batch_size=4)), _work(**limits)
    visits = [Visit(3, cid, 0, 4) for cid in range(4)]
    expected = [_by_loaders(trainer, server, visit) for visit in visits]
    for plan_, own in zip(Plan.all_of(trainer, server, visits), expected, strict=True):
        found = Batches([plan_], lambda batch: batch, torch.zeros(1).double(), {}).take([slice(plan_.steps)])
        for t, batch in enumerate(own):
            size = int(plan_.sizes[t])
            assert all(torch.equal(part[t, :size], whole) for part, whole in zip(found, batch, strict=True))


class _OwnLoaders(FederatedDataModule):
    def client_dataloader(self, cid, generator=None, *, shuffle=True):
        return super().client_dataloader(cid, generator, shuffle=shuffle)


def _undeclared():
    return [TensorRows(d.tensors, torch.arange(len(d)), lambda batch: batch) for d in _datasets()]


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (lambda: _OwnLoaders(_datasets(), batch_size=4), "_OwnLoaders overrides client_dataloader"),
        (lambda: FederatedDataModule(_undeclared(), batch_size=4), "transform of client 0 is not declared row_by_row"),
        (lambda: FederatedDataModule([[1, 2, 3]], batch_size=2), "client 0 are not tensors in memory"),
    ],
)
def test_batches_that_only_a_loader_can_make_cannot_be_planned(data, reason):
    with pytest.raises(UnfitError, match=reason):
        Plan.all_of(_Trainer(data()), _work(local_steps=1), [Visit(0, 0, 0, 1)])


def test_one_visit_is_planned_as_among_others():
    trainer, server = _Trainer(FederatedDataModule(_datasets(), batch_size=4)), _work(local_steps=9)
    together = Plan.all_of(trainer, server, [Visit(1, cid, 0, 4) for cid in range(4)])
    for cid, among in enumerate(together):
        (alone,) = Plan.all_of(trainer, server, [Visit(1, cid, 0, 1)])
        assert torch.equal(alone.rows, among.rows)
        assert alone.sizes.tolist() == among.sizes.tolist()


def test_memory_for_batches_is_used_again_but_not_kept_if_it_is_much(monkeypatch):
    scratch = {}
    trainer = _Trainer(FederatedDataModule(_datasets(), batch_size=4))
    plans = Plan.all_of(trainer, _work(local_steps=9), [Visit(1, cid, 0, 4) for cid in range(4)])
    batches = Batches(plans, lambda batch: batch, torch.zeros(1).double(), scratch)
    with torch.inference_mode():
        first = batches.take([slice(0, 1)] * 4)[0].data_ptr()
    assert batches.take([slice(1, 2)] * 4)[0].data_ptr() == first  # written outside of inference mode, too
    monkeypatch.setattr(plan, "BLOCK_BYTES", 8)
    scratch.clear()
    batches.take([slice(0, 2)] * 4)
    assert not scratch


def test_clients_may_share_inputs_and_not_labels():
    inputs = torch.arange(4.0)
    data = FederatedDataModule([TensorDataset(inputs, torch.arange(4) + 10 * i) for i in range(2)], batch_size=2)
    plans = Plan.all_of(_Trainer(data), _work(local_steps=1), [Visit(0, cid, 0, 2) for cid in range(2)])
    x, y = Batches(plans, lambda batch: batch, torch.zeros(1), {}).take([slice(1)] * 2)
    assert y.tolist() == [(own + 10 * i).tolist() for i, own in enumerate(x.long())]
