"""Data of Hugging Face's `datasets`: dealt to clients by a column that is read without decoding a sample."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import Subset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.data.partition import IID, ByKey, Dirichlet, Shards, labels_of

datasets = pytest.importorskip("datasets")

N = 60
SPEAKERS = [f"speaker {i % 4}" for i in range(N)]
federate = FederatedDataModule.from_huggingface


def speech(rows: int = N, **more: Any) -> Any:
    """Labels 0, 1, 2 in turn; speakers 0 to 3 in turn; ids of three tokens that begin with the row."""
    columns = {
        "speaker": SPEAKERS[:rows],
        "label": [i % 3 for i in range(rows)],
        "ids": [[i, i + 1, i + 2] for i in range(rows)],
    }
    return datasets.Dataset.from_dict(columns | more)


def undecodable(rows: int = N) -> Any:
    """As above, with images that nobody can open."""
    broken = [{"bytes": b"no image", "path": None}] * rows
    return speech(rows, image=broken).cast_column("image", datasets.Image())


def rows_of(data: FederatedDataModule, cid: str | int, split: str = "train") -> list[int]:
    return [int(sample["ids"][0]) for sample in data.client_dataset(cid, split)]


@pytest.mark.parametrize("by", ["speaker", ByKey("speaker"), IID(4), Dirichlet(4, 1.0), Shards(4)], ids=repr)
def test_no_sample_is_decoded_to_deal_it(by: Any) -> None:
    dataset = undecodable()
    with pytest.raises(Exception, match="cannot identify image"):
        dataset[0]
    for given in (dataset, dataset.shuffle(seed=1), dataset.select(range(10, 50))):
        data = federate(given, by, test_fraction=0.2)
        held = [data.client_dataset(cid, split) for split in ("train", "test") for cid in data.split_ids(split)]
        assert sorted(row for part in held for row in part.indices) == list(range(len(given)))


@pytest.mark.parametrize(
    "chosen",
    [
        lambda dataset: dataset,
        lambda dataset: dataset.shuffle(seed=3),
        lambda dataset: dataset.select([7, 3, 50, 3 * 4, 11, 8]),
        lambda dataset: dataset.shuffle(seed=3).select(range(5, 30)).with_format("torch", columns=["ids"]),
        lambda dataset: datasets.concatenate_datasets([dataset.select(range(9)), dataset.shuffle(seed=3)]),
    ],
    ids=["whole", "shuffled", "selected", "formatted", "concatenated"],
)
def test_every_client_gets_its_own_samples_whatever_rows_the_dataset_has(chosen: Callable[[Any], Any]) -> None:
    dataset = chosen(speech())
    data = federate(dataset, "speaker")
    everything = [int(sample["ids"][0]) for sample in dataset]
    assert sorted(row for cid in data.client_ids for row in rows_of(data, cid)) == sorted(everything)
    for cid in data.client_ids:
        assert {SPEAKERS[row] for row in rows_of(data, cid)} == {cid}


def test_clients_are_those_of_the_same_partition_of_tensors() -> None:
    dataset = speech()
    tensors = TensorDataset(torch.arange(N), torch.tensor(dataset["label"][:]))
    for partition in (Dirichlet(5, 0.5, seed=2), Shards(5, 2, seed=2), IID(5, seed=2)):
        ours = federate(dataset, partition, test_fraction=0.25, val_fraction=0.1, seed=4)
        theirs = FederatedDataModule.from_dataset(tensors, partition, test_fraction=0.25, val_fraction=0.1, seed=4)
        for split in ("train", "val", "test"):
            assert ours.split_ids(split) == theirs.split_ids(split)
            for cid in ours.split_ids(split):
                assert ours.client_dataset(cid, split).indices == theirs.client_dataset(cid, split).indices


def test_labels_are_read_through_shuffles_and_subsets() -> None:
    dataset = undecodable().shuffle(seed=5)
    wanted = np.asarray(dataset["label"][:])
    assert labels_of(dataset).tolist() == wanted.tolist()
    assert labels_of(Subset(dataset, [9, 2, 4])).tolist() == wanted[[9, 2, 4]].tolist()


def test_another_column_may_be_the_label() -> None:
    dataset = speech(fine=[i % 6 for i in range(N)])
    dealt = federate(dataset, Shards(6, 1), label="fine")
    assert {len({row % 6 for row in rows_of(dealt, cid)}) for cid in dealt.client_ids} == {1}
    named = dataset.remove_columns("label").cast_column("fine", datasets.ClassLabel(num_classes=6))
    dealt = federate(named, Shards(6, 1))
    assert {len({row % 6 for row in rows_of(dealt, cid)}) for cid in dealt.client_ids} == {1}
    assert federate(named, IID(2)).class_names == tuple("012345")
    assert federate(named.rename_column("fine", "kind"), IID(2), label="kind").class_names == tuple("012345")
    assert federate(dataset, IID(2)).class_names == ()
    with pytest.raises(ValueError, match=r"Which column is the label\? The dataset has speaker, ids, fine"):
        federate(dataset.remove_columns("label"), Shards(6, 1))


def test_a_function_gets_the_dataset_itself() -> None:
    def even(dataset: Any) -> dict[str, list[int]]:
        assert type(dataset) is datasets.Dataset
        assert dataset.column_names == ["speaker", "label", "ids"]
        return {"even": list(range(0, len(dataset), 2)), "odd": list(range(1, len(dataset), 2))}

    data = federate(speech(), even)
    assert rows_of(data, "odd") == list(range(1, N, 2))


def test_batches_are_tensors_of_the_chosen_columns() -> None:
    data = federate(speech(), "speaker", columns=["ids", "label"])
    batch = next(iter(data.client_eval_dataloader("speaker 1", "train")))
    assert batch.keys() == {"ids", "label"}
    assert batch["ids"].tolist() == [[row, row + 1, row + 2] for row in range(1, N, 4)]
    assert batch["label"].tolist() == [row % 3 for row in range(1, N, 4)]
    pooled = next(iter(data.train_dataloader()))
    assert pooled["ids"].shape == (32, 3)


def test_a_format_transform_or_collation_of_ones_own_stays() -> None:
    doubled = speech().with_transform(lambda rows: {"twice": [2 * ids[0] for ids in rows["ids"]]})
    batch = next(iter(federate(doubled, "speaker").client_eval_dataloader("speaker 2", "train")))
    assert batch["twice"].tolist() == [2 * row for row in range(2, N, 4)]

    def pad(samples: list[dict[str, Any]]) -> list[Any]:
        assert type(samples[0]["ids"]) is list
        return [sample["ids"] for sample in samples]

    data = federate(speech(), "speaker", loader_options={"collate_fn": pad})
    assert next(iter(data.client_eval_dataloader("speaker 0", "train")))[0] == [0, 1, 2]
    numbers = federate(speech().with_format("numpy"), "speaker", columns=["ids"])
    assert isinstance(numbers.client_dataset("speaker 0")[0]["ids"], np.ndarray)


def test_evaluation_splits_are_dealt_by_the_same_column_if_they_have_it() -> None:
    parts = datasets.DatasetDict(train=speech(20).filter(lambda s: s != "speaker 3", input_columns="speaker"))
    parts |= {"validation": speech(8), "test": speech(12).remove_columns("speaker"), "unsupervised": speech(4)}
    data = federate(parts, "speaker", columns=["ids", "label"])
    assert data.client_ids == ["speaker 0", "speaker 1", "speaker 2"]
    assert data.split_ids("val") == [*data.client_ids, "speaker 3"]  # evaluated, never visited
    assert rows_of(data, "speaker 3", "val") == [3, 7]
    assert data.split_ids("test") == ["server"]
    assert rows_of(data, "server", "test") == list(range(12))
    dealt = federate(datasets.DatasetDict(train=speech(), valid=speech(8)), IID(3), test_fraction=0.2)
    assert dealt.split_ids("val") == ["server"]
    assert dealt.split_ids("test") == [0, 1, 2]


@pytest.mark.parametrize(
    ("make", "error", "says"),
    [
        (lambda: federate(speech(), "speeker"), ValueError, "no column 'speeker'. It has speaker, label, ids"),
        (lambda: federate(speech(), IID(2), columns=["id"]), ValueError, "dataset has speaker, label, ids"),
        (lambda: federate(speech(), IID(2), columns="ids"), TypeError, r"list of names such as \['ids'\]"),
        (lambda: federate(speech(), IID(2), columns=[]), ValueError, r"columns=\[\], but the dataset has speaker"),
        (lambda: federate(speech(), Shards(2), label="lable"), ValueError, "label='lable' names no column"),
        (lambda: federate(speech(4, speaker=["a", None, "b", None]), "speaker"), ValueError, "row 1 .2 such rows."),
        (lambda: federate(speech().to_iterable_dataset(), IID(2)), TypeError, "streaming dataset"),
        (lambda: federate({"train": [1, 2]}, IID(2)), TypeError, "takes a datasets.Dataset .* got dict"),
        (lambda: federate(datasets.DatasetDict(all=speech()), IID(2)), ValueError, "no split 'train'. It has all"),
        (lambda: federate(speech(), "ids"), ValueError, "key of sample 0 must be a whole number or a string"),
        (lambda: federate(speech(), 3), TypeError, "by must be the name of a column .* got 3"),
        (
            lambda: federate(datasets.DatasetDict(train=speech(), test=speech()), IID(2), test_fraction=0.1),
            ValueError,
            "both test= and test_fraction",
        ),
        (
            lambda: federate(datasets.DatasetDict(train=speech(), val=speech(), dev=speech()), IID(2)),
            ValueError,
            "two splits for val: train, val, dev",
        ),
        (lambda: federate(speech(), IID(2), train={0: [1]}), ValueError, "both train= and"),
    ],
)
def test_mistakes_are_named(make: Callable[[], object], error: type[Exception], says: str) -> None:
    with pytest.raises(error, match=says):
        make()


class Sign(pl.LightningModule):
    """Predict a label from the parity of a row."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(2, 2)

    def _step(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        logits = self.net(batch["x"])
        accuracy = (logits.argmax(1) == batch["label"]).float().mean()
        return torch.nn.functional.cross_entropy(logits, batch["label"]), accuracy

    def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
        return self._step(batch)[0]

    def test_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
        self.log("test_acc", self._step(batch)[1])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5)


def test_a_federation_learns_from_it_and_is_tested_on_the_server(tmp_path: Any) -> None:
    x = np.random.default_rng(0).normal(size=(N, 2)).astype(np.float32)
    train = speech(x=x.tolist()).remove_columns("label").add_column("label", (x[:, 0] > 0).astype(int).tolist())
    parts = datasets.DatasetDict(train=train, test=train.select(range(30)).remove_columns("speaker"))
    data = federate(parts, "speaker", columns=["x", "label"], batch_size=5)
    pl.seed_everything(0, verbose=False)
    module, server = Sign(), FederatedServer(FedAvg(), clients_per_round=2, local_epochs=2)
    options = {"logger": False, "enable_progress_bar": False, "enable_checkpointing": False}
    trainer = pl.Trainer(default_root_dir=tmp_path, max_epochs=6, callbacks=[server], accelerator="cpu", **options)
    trainer.fit(module, datamodule=data)
    (result,) = trainer.test(module, datamodule=data, verbose=False)
    assert result["test_acc"] > 0.9
