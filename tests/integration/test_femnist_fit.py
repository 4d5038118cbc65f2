"""FEMNIST in use: what its batches hold, that they are mapped and not copied, and that federations train on them."""

import pickle
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.femnist_files import arrays, caches, people, write_leaf, write_npz, write_split
from helpers.modules import Witness, measured, quiet_trainer, x_of
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import DataLoader, RandomSampler, Subset, TensorDataset

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.data.tensor_loader import TensorLoader, TensorRows, in_memory
from lightning_fed.datamodules import FEMNIST
from lightning_fed.datamodules.femnist import sources
from lightning_fed.datamodules.femnist.characters import Block, Characters

SOME = people(3, zoe=6, ann=4, bob=5)

pytestmark = pytest.mark.usefixtures("own_cache")


class Linear(pl.LightningModule):
    """784 pixels to 62 characters."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(784, 62)
        nn.init.zeros_(self.layer.weight)
        nn.init.zeros_(self.layer.bias)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def test_step(self, batch: list[Tensor], batch_idx: int) -> None:
        logits = self(batch[0])
        self.log("test_loss", nn.functional.cross_entropy(logits, batch[1]), batch_size=len(batch[1]))
        self.log("test_acc", (logits.argmax(1) == batch[1]).float().mean(), batch_size=len(batch[1]))

    validation_step = test_step

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01)


def femnist(**kwargs: Any) -> FEMNIST:
    path = kwargs.pop("path", None) or write_leaf(Path("all_data.json"), SOME)
    data = FEMNIST(path, **{"batch_size": 2, **kwargs})
    data.prepare_data()
    data.setup()
    return data


def whole(batches: Iterable[list[Tensor]]) -> tuple[Tensor, Tensor]:
    """All pixels and labels of a loader."""
    pixels, labels = zip(*batches, strict=True)
    return torch.cat(pixels), torch.cat(labels)


def alike(one: Iterable[list[Tensor]], other: Iterable[list[Tensor]]) -> bool:
    pairs = list(zip(one, other, strict=True))
    return bool(pairs) and all(
        a.dtype == b.dtype and torch.equal(a, b) for left, right in pairs for a, b in zip(left, right, strict=True)
    )


def train_batches(data: FEMNIST, cid: str) -> tuple[Tensor, Tensor]:
    return whole(data.client_eval_dataloader(cid, "train"))


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_pixels_are_exactly_k_of_255_with_white_paper(dtype: Any) -> None:
    data = femnist(pixels={"dtype": dtype}, split={"train_fraction": 1.0})
    assert data.client_ids == ["zoe", "ann", "bob"]
    for name, (images, labels) in SOME.items():
        x, y = train_batches(data, name)
        assert (x.dtype, y.dtype) == (getattr(torch, dtype), torch.int64)
        assert torch.equal(x, torch.tensor(images / 255, dtype=getattr(torch, dtype)))
        assert y.tolist() == labels.tolist()
        assert (x[:, 0] == 1).all()
        assert x.min() < 0.05


def test_inverted_pixels_are_ink_on_black_paper() -> None:
    path = write_leaf(Path("all_data.json"), SOME)
    data = [femnist(path=path, pixels={"invert": invert, "dtype": "float64"}) for invert in (False, True)]
    plain, inverted = (train_batches(one, "zoe")[0] for one in data)
    assert torch.allclose(inverted, 1 - plain, atol=1e-15, rtol=0)
    assert (inverted[:, 0] == 0).all()
    assert len(caches()) == 1


def test_an_npz_and_json_of_the_same_characters_give_the_same_batches() -> None:
    one, other = femnist(), femnist(path=write_npz(Path("w.npz"), arrays(SOME)))
    for cid in SOME:
        for split in ("train", "test"):
            assert alike(one.client_eval_dataloader(cid, split), other.client_eval_dataloader(cid, split))


def test_the_seed_decides_who_takes_part_and_what_is_tested() -> None:
    path = write_leaf(Path("many.json"), people(**{f"w{k}": 4 for k in range(12)}))

    def drawn(seed: int) -> tuple[list[Any], list[int]]:
        data = femnist(path=path, writers=5, seed=seed, split={"train_fraction": 0.5})
        return data.client_ids, whole(data.test_dataloader())[1].tolist()

    assert drawn(1) == drawn(1)
    assert drawn(1)[0] != drawn(2)[0]
    assert drawn(1)[1] != drawn(2)[1]


def test_later_starts_do_not_read_the_source(monkeypatch: pytest.MonkeyPatch) -> None:
    first = femnist()

    def unread(path: Path) -> Iterable[Block]:
        raise AssertionError("read again")

    monkeypatch.setitem(sources.READERS, "leaf", unread)
    again = FEMNIST("all_data.json", batch_size=2)
    again.prepare_data()
    again.setup("fit")
    again.setup("test")
    assert alike(first.test_dataloader(), again.test_dataloader())
    assert "FEMNIST (LEAF JSON) of all_data.json (3 writers, 15 characters)" in again.description


def test_clients_share_the_memory_of_the_map(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[Characters] = []
    load = sources.load
    monkeypatch.setattr(sources, "load", lambda *args: opened.append(load(*args)) or opened[-1])
    data = femnist()
    for split in ("train", "test"):
        for cid in data.split_ids(split):
            dataset: Any = data.client_dataset(cid, split)
            assert type(dataset) is TensorRows
            images, labels = dataset.tensors
            assert images.data_ptr() == opened[-1].images.ctypes.data
            assert labels.data_ptr() == opened[-1].labels.ctypes.data
            assert images.dtype == torch.uint8
    whole(data.train_dataloader())[0].fill_(0.5)
    assert torch.equal(train_batches(data, "zoe")[0], train_batches(femnist(), "zoe")[0])


@pytest.mark.parametrize("drop_last", [False, True])
def test_tensor_loaders_and_data_loaders_give_the_same_batches(drop_last: bool) -> None:
    data = femnist(drop_last=drop_last)
    for cid in data.client_ids:
        dataset: Any = data.client_dataset(cid)
        loader = data.client_dataloader(cid, torch.Generator().manual_seed(7))
        assert isinstance(loader, TensorLoader)
        sampler = RandomSampler(dataset, generator=torch.Generator().manual_seed(7))
        assert alike(loader, DataLoader(dataset, 2, sampler=sampler, drop_last=drop_last))
        assert alike(data.client_eval_dataloader(cid, "train"), DataLoader(dataset, data.eval_batch_size))


def test_the_pooled_test_data_are_those_of_the_clients_one_after_the_other() -> None:
    data = femnist(split={"train_fraction": 0.5})
    clients = [whole(data.client_eval_dataloader(cid, "test")) for cid in data.split_ids("test")]
    pooled = whole(data.test_dataloader())
    for part in (0, 1):
        assert torch.equal(pooled[part], torch.cat([client[part] for client in clients]))
    x, y = whole(data.train_dataloader())
    assert sorted(y.tolist()) == sorted(y for cid in SOME for y in train_batches(data, cid)[1].tolist())
    assert x.shape == (len(y), 784)


def test_rows_behave_as_a_dataset() -> None:
    dataset: Any = femnist(split={"train_fraction": 1.0}).client_dataset("ann")
    x, y = dataset[-1]
    assert torch.equal(x, dataset[3][0])
    assert (x.shape, y.shape, y.dtype) == ((784,), (), torch.int64)
    assert dataset.targets.tolist() == SOME["ann"][1].tolist() == [int(label) for _, label in dataset]
    with pytest.raises(IndexError):
        dataset[4]
    tensors, rows, transform = in_memory(Subset(Subset(dataset, [3, 1, 0]), [2, 0])) or pytest.fail("not in memory")
    (batch,) = TensorLoader(tensors, rows, transform, batch_size=9)
    assert torch.equal(batch[0], torch.stack([dataset[0][0], dataset[3][0]]))


@pytest.mark.parametrize("ready", [False, True])
def test_a_datamodule_survives_pickling(ready: bool) -> None:
    data = femnist() if ready else FEMNIST(write_leaf(Path("all_data.json"), SOME), batch_size=2)
    copy = pickle.loads(pickle.dumps(data))
    copy.setup()
    data.setup()
    assert copy.client_ids == data.client_ids
    for split in ("train", "test"):
        assert alike(copy.client_eval_dataloader("zoe", split), data.client_eval_dataloader("zoe", split))


def test_unseen_writers_are_evaluated_but_never_visited() -> None:
    data = femnist(split={"by": "user", "train_fraction": 0.67})
    (stranger,) = data.split_ids("test")
    assert sorted([*data.client_ids, stranger]) == sorted(SOME)
    assert len(data.client_ids) == 2
    witness, module = Witness(), Linear()
    trainer = quiet_trainer(FederatedServer(FedAvg(), local_steps=1), 3, callbacks=[witness])
    trainer.fit(module, datamodule=data)
    assert {cid for cohort in witness.cohorts for cid in cohort} == set(data.client_ids)
    expected = measured(Linear(), x_of(module), TensorDataset(*whole(data.client_eval_dataloader(stranger, "test"))))
    logged = [float(trainer.callback_metrics[f"federated/test_{what}"]) for what in ("loss", "accuracy")]
    assert logged == pytest.approx(expected, rel=1e-5)
    assert expected[0] != pytest.approx(np.log(62), rel=1e-6)  # it has moved
    assert trainer.test(module, datamodule=data, verbose=False)[0]["test_loss"] == pytest.approx(expected[0], rel=1e-5)


def test_a_given_split_by_user_has_strangers_too(tmp_path: Path) -> None:
    data = femnist(path=write_split(Path("leaf"), people(1, ann=3, bob=3), people(2, bob=2, cyd=4)))
    assert (data.client_ids, data.split_ids("test")) == (["ann", "bob"], ["bob", "cyd"])
    witness = Witness()
    server = FederatedServer(FedADMM(eta=1.0), local_steps=1)
    trainer = quiet_trainer(server, 1, callbacks=[witness], logger=CSVLogger(tmp_path, "csv"))
    trainer.fit(Linear(), datamodule=data)
    assert set(witness.cohorts[0]) == {"ann", "bob"}


@pytest.mark.parametrize("as_path", [False, True])
def test_a_fit_is_resumed_from_its_checkpoint(as_path: bool) -> None:
    path = write_leaf(Path("all_data.json"), SOME)
    data: dict[str, Any] = {"path": path if as_path else str(path)}
    trainer = quiet_trainer(FederatedServer(FedAvg(), local_steps=1), 1)
    trainer.fit(Linear(), datamodule=femnist(**data))
    trainer.save_checkpoint("half.ckpt")
    ends = []
    for ckpt_path in (None, "half.ckpt"):
        module = Linear()
        quiet_trainer(FederatedServer(FedAvg(), local_steps=1), 2).fit(
            module, datamodule=femnist(**data), ckpt_path=ckpt_path
        )
        ends.append(x_of(module))
    assert torch.equal(*ends)


def test_a_plain_trainer_trains_on_the_pooled_characters() -> None:
    module = Linear()
    trainer = quiet_trainer(rounds=2)
    trainer.fit(module, datamodule=femnist(eval_batch_size=3))
    assert trainer.global_step == 12  # of 5 + 3 + 4 characters, in batches of 2
