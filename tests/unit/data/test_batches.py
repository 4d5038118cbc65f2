"""The batches of a visit: a stream across the borders of epochs, or epochs with a short last batch."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.core.draws import epoch_orders
from lightning_fed.core.local_work import LocalWork
from lightning_fed.data.batches import Cut, cut_visit


def cut(samples: int, size: int, drop_last: bool = False, work: float = 1.0, **settings: Any) -> Cut:
    trainer = {"overfit_batches": 0.0, "limit_train_batches": 1.0}
    trainer |= {key: settings.pop(key) for key in list(settings) if key in trainer}
    whole = LocalWork(0, settings.get("local_steps"), settings.get("local_epochs"))
    return cut_visit(SimpleNamespace(**trainer), whole, samples, size, drop_last, work)


def batches(of: Cut, orders: np.ndarray) -> list[list[int]]:
    return [row[:size].tolist() for row, size in zip(of.rows(orders), of.sizes(), strict=True)]


def test_steps_take_batches_of_one_size_from_a_stream_of_epochs() -> None:
    orders = np.array([[0, 1, 2, 3, 4], [10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
    of = cut(5, 2, local_steps=6, drop_last=True)
    assert of.epochs == 3
    assert batches(of, orders) == [[0, 1], [2, 3], [4, 10], [11, 12], [13, 14], [20, 21]]
    assert of.first_steps() == [0, 3, 5]  # the batch that begins in epoch 1 is [11, 12]


@pytest.mark.parametrize(("samples", "size"), [(3, 8), (8, 8), (9, 8), (1, 8), (16, 8), (17, 8)])
def test_every_batch_of_a_stream_has_the_same_size(samples: int, size: int) -> None:
    of = cut(samples, size, local_steps=7)
    rows = of.rows(epoch_orders(0, 0, ["a"], [samples], [of.epochs])[0])
    assert rows.shape == (7, min(samples, size))
    assert of.sizes().tolist() == [min(samples, size)] * 7
    for epoch in range(of.epochs - 1):  # every epoch looks at every sample
        seen = rows.reshape(-1)[epoch * samples : (epoch + 1) * samples]
        assert sorted(seen) == list(range(samples))


def test_epochs_keep_their_short_last_batch() -> None:
    orders = np.array([[0, 1, 2, 3, 4], [10, 11, 12, 13, 14]])
    assert batches(cut(5, 2, local_epochs=2), orders) == [[0, 1], [2, 3], [4], [10, 11], [12, 13], [14]]
    assert batches(cut(5, 2, local_epochs=2, drop_last=True), orders) == [[0, 1], [2, 3], [10, 11], [12, 13]]
    assert batches(cut(4, 2, local_epochs=1), orders[:1, :4]) == [[0, 1], [2, 3]]
    assert cut(5, 8, local_epochs=3).sizes().tolist() == [5, 5, 5]


def test_limits_work_and_overfitting() -> None:
    assert cut(50, 2, local_steps=10, limit_train_batches=4).steps == 4
    assert cut(50, 2, local_steps=10, limit_train_batches=0.5).steps == 5
    assert cut(50, 2, local_steps=10, work=0.35).steps == 3
    assert cut(5, 2, local_epochs=4, work=0.5).steps == 6
    assert cut(5, 2, local_epochs=4, limit_train_batches=7).sizes().tolist() == [2, 2, 1, 2, 2, 1, 2]
    of = cut(50, 2, local_steps=5, overfit_batches=2, limit_train_batches=2)
    assert batches(of, np.tile(np.arange(50), (3, 1))) == [[0, 1], [2, 3], [0, 1], [2, 3], [0, 1]]


def test_a_client_without_a_full_batch_is_refused_only_where_that_leaves_it_without_any() -> None:
    with pytest.raises(ValueError, match="3 samples are less than one batch of 4, and drop_last=True"):
        cut(3, 4, drop_last=True, local_epochs=1)
    assert cut(3, 4, drop_last=True, local_steps=2).sizes().tolist() == [3, 3]


class Listed(Dataset):
    """Not in memory: goes through a DataLoader."""

    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.x[i], self.y[i]


class Seen(Net):
    def __init__(self) -> None:
        super().__init__()
        self.batches: list[Tensor] = []
        self.indices: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.batches.append(batch[0].clone())
        self.indices.append(batch_idx)
        return super().training_step(batch, batch_idx)


def seen(data: FederatedDataModule, **options: Any) -> Seen:
    module, given = Seen(), {"local_steps": 5, "seed": 3, "evaluate_every": 0, "engine": "sequential", **options}
    quiet_trainer(FederatedServer(FedAvg(), **given), 2, limit_val_batches=0).fit(module, datamodule=data)
    return module


@pytest.mark.parametrize("options", [{}, {"local_steps": None, "local_epochs": 2}], ids=["steps", "epochs"])
@pytest.mark.parametrize("size", [4, 9, 50])
def test_every_kind_of_data_gives_the_same_batches(options: dict[str, Any], size: int) -> None:
    data = classification(2, batch_size=size)
    listed = FederatedDataModule({c: Listed(*d.tensors) for c, d in data.splits["train"].items()}, batch_size=size)
    expected, found = seen(data, **options), seen(listed, **options)
    assert all(torch.equal(*pair) for pair in zip(expected.batches, found.batches, strict=True))
    assert expected.indices == found.indices


def test_the_batches_of_a_visit_are_those_of_the_specification() -> None:
    data = classification(2)
    found = iter(seen(data).batches)
    for round in range(2):
        for cid in ("c0", "c1"):
            x = data.client_dataset(cid).tensors[0]
            stream = epoch_orders(3, round, [cid], [len(x)], [3])[0].reshape(-1)
            for t in range(5):
                assert torch.equal(next(found), x[stream[4 * t : 4 * t + 4]])


def test_batch_idx_runs_through_the_visit() -> None:
    assert seen(classification(1), local_steps=7).indices == [*range(7)] * 2
    assert seen(classification(1), local_steps=None, local_epochs=2).indices == [*range(6)] * 2


def test_a_loader_of_the_users_own_cuts_its_own_batches() -> None:
    class Own(FederatedDataModule):
        def client_dataloader(self, cid: Any, generator: Any = None, *, shuffle: bool = True) -> Any:
            return DataLoader(self.client_dataset(cid), 4, shuffle=shuffle, generator=generator)

    data = Own({"a": TensorDataset(torch.randn(6, 6), torch.zeros(6, dtype=torch.int64))})
    assert [len(batch) for batch in seen(data).batches] == [4, 2, 4, 2, 4] * 2


def test_epochs_without_batches_are_refused_before_training() -> None:
    server = FederatedServer(FedAvg(), local_epochs=1)
    with pytest.raises(ValueError, match=r"Client 'c0' has 9 samples, less than one batch of 10.*local_steps"):
        quiet_trainer(server, 1).fit(Net(), datamodule=classification(2, batch_size=10, drop_last=True))
    server = FederatedServer(FedAvg(), local_steps=2, evaluate_every=0)
    quiet_trainer(server, 1).fit(Net(), datamodule=classification(2, batch_size=10, drop_last=True))
