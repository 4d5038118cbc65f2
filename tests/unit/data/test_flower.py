"""Partitioners of flwr-datasets deal Hugging Face's datasets and any other."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.partition import as_partitioner, deal_samples

datasets = pytest.importorskip("datasets")
partitioners = pytest.importorskip("flwr_datasets.partitioner", reason="flwr-datasets is not installed")

N = 60
LABELS = [i % 3 for i in range(N)]


def speech() -> Any:
    broken = [{"bytes": b"no image", "path": None}] * N
    columns = {"speaker": [f"speaker {i % 4}" for i in range(N)], "label": LABELS, "image": broken}
    return datasets.Dataset.from_dict(columns).cast_column("image", datasets.Image())


def test_clients_are_those_of_flower_and_no_image_is_decoded() -> None:
    rule = partitioners.DirichletPartitioner(4, "label", alpha=1.0, min_partition_size=2, seed=3)
    theirs = partitioners.DirichletPartitioner(4, "label", alpha=1.0, min_partition_size=2, seed=3)
    theirs.dataset = datasets.Dataset.from_dict({"label": LABELS, "row": range(N)})
    wanted = {i: sorted(theirs.load_partition(i)["row"]) for i in range(4)}
    for given in (speech(), speech().shuffle(seed=1)):
        assert sum(map(len, deal_samples(rule, given).values())) == N  # a partitioner may be used again
    data = FederatedDataModule.from_huggingface(speech(), rule)
    assert {cid: list(data.client_dataset(cid).indices) for cid in data.client_ids} == wanted
    tensors = TensorDataset(torch.zeros(N, 2), torch.tensor(LABELS))
    assert deal_samples(rule, tensors) == wanted


def test_natural_partitions_keep_their_names() -> None:
    dealt = as_partitioner(partitioners.NaturalIdPartitioner("speaker"))(speech())
    assert {cid: rows for cid, rows in dealt.items() if cid == "speaker 2"} == {"speaker 2": list(range(2, N, 4))}
    assert len(dealt) == 4


@pytest.mark.parametrize("kind", ["IidPartitioner", "LinearPartitioner", "SquarePartitioner"])
def test_other_partitioners_deal_every_sample_once(kind: str) -> None:
    dealt = deal_samples(getattr(partitioners, kind)(5), TensorDataset(torch.zeros(N, 2), torch.tensor(LABELS)))
    assert sorted(np.concatenate(list(dealt.values())).tolist()) == list(range(N))


def test_a_function_that_hands_flowers_indices_on_is_a_partition_too() -> None:
    def dealt(labels: np.ndarray) -> list[list[int]]:
        rule = partitioners.IidPartitioner(3)
        rule.dataset = datasets.Dataset.from_dict({"row": range(len(labels))})
        return [rule.load_partition(i)["row"][:] for i in range(3)]

    assert len(deal_samples(dealt, TensorDataset(torch.zeros(N, 2), torch.tensor(LABELS)))) == 3


@pytest.mark.parametrize(
    ("rule", "says"),
    [
        (partitioners.VerticalEvenPartitioner(2), "VerticalEvenPartitioner deals columns, and clients need samples"),
        (partitioners.NaturalIdPartitioner("speaker"), r"NaturalIdPartitioner .* sees the columns label: .*speaker"),
    ],
)
def test_partitioners_that_find_no_samples_are_named(rule: Any, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        deal_samples(rule, TensorDataset(torch.zeros(N, 2), torch.tensor(LABELS)))
