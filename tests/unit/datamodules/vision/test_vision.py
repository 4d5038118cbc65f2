"""Data sets of torchvision, from files that the tests write: who gets which image, and what it becomes."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from helpers.image_files import write_folder, write_mnist
from torch.utils.data import Subset
from torchvision import datasets
from torchvision import transforms as v1
from torchvision.transforms import v2

from lightning_fed.data import Augmented, TensorRows, Transformed
from lightning_fed.data.partition import IID, Dirichlet, labels_of
from lightning_fed.datamodules import Vision
from lightning_fed.datamodules.vision import pixels

FAKE = {"size": 60, "image_size": (3, 8, 8), "num_classes": 3}
PLAIN = v2.Compose([v2.ToImage(), v2.ToDtype(torch.float32, scale=True)])
RANDOM = v2.Compose([v2.RandomCrop(8, padding=2), v2.RandomHorizontalFlip(), *PLAIN.transforms])


def made(*args: Any, **kwargs: Any) -> Vision:
    data = Vision(*args, **kwargs)
    data.prepare_data()
    data.setup()
    return data


def samples(data: Vision, cid: str | int, split: str = "train") -> list[tuple[Any, int]]:
    return [(image, int(label)) for image, label in data.client_dataset(cid, split)]  # type: ignore[attr-defined]


def test_mnist_is_dealt_to_clients_and_tested_on_the_server(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = made("MNIST", Dirichlet(4, 0.5, min_examples=3), root=tmp_path)
    assert data.client_ids == [0, 1, 2, 3]
    assert data.split_ids("test") == ["server"]
    assert sum(map(data.num_examples, data.client_ids)) == 60
    raw = datasets.MNIST(tmp_path, train=False)
    for (image, label), (wanted, digit) in zip(samples(data, "server", "test"), raw, strict=True):
        assert torch.equal(image, PLAIN(wanted))
        assert label == digit
    assert data.class_names[3] == "3 - three"
    assert data.description.startswith("MNIST (4 clients, 60 train, 20 test images, Dirichlet(clients=4")


def test_images_of_a_client_are_those_that_the_partition_gave_it(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    rule, raw = Dirichlet(4, 0.5), datasets.MNIST(tmp_path)
    data = made("MNIST", rule, root=tmp_path)
    for cid, rows in rule(raw).items():
        assert all(
            torch.equal(image, PLAIN(raw[row][0])) and label == raw[row][1]
            for (image, label), row in zip(samples(data, cid), rows, strict=True)
        )


@pytest.mark.parametrize(
    "transform",
    [
        PLAIN,
        v2.Compose([PLAIN, v2.Normalize([0.5], [0.25])]),
        v2.Compose([v2.Resize(9), v2.Pad(1), PLAIN]),
        v2.Compose([v2.Grayscale(3), v2.ToImage(), v2.ToDtype(torch.float64, scale=True), v2.ToPureTensor()]),
        v2.Compose([v2.PILToTensor(), v2.ConvertImageDtype(torch.float32)]),
        v1.Compose([v1.ToTensor(), v1.Normalize([0.5], [0.25], inplace=True)]),
    ],
)
def test_images_in_memory_have_the_bits_of_those_that_are_read_one_by_one(tmp_path: Path, transform: Any) -> None:
    write_mnist(tmp_path)
    kept, read = (made("MNIST", IID(2), tmp_path, transform, in_memory=where) for where in (True, False))
    assert type(kept.client_dataset(0)) is TensorRows
    assert type(read.client_dataset(0)) is Transformed
    for split, cid in (("train", 1), ("test", "server")):
        for ours, theirs in zip(*(d.client_eval_dataloader(cid, split) for d in (kept, read)), strict=True):
            assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(ours, theirs, strict=True))
            assert type(ours[0]) is torch.Tensor


def test_bytes_are_kept_and_large_data_sets_are_read_one_by_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_mnist(tmp_path)
    kept = made("MNIST", IID(2), tmp_path).client_dataset(0)
    assert isinstance(kept, TensorRows)
    assert kept.tensors[0].dtype == torch.uint8
    monkeypatch.setattr(pixels, "MOST_BYTES", 60 * 784 - 1)
    assert type(made("MNIST", IID(2), tmp_path).client_dataset(0)) is Transformed


class TinyCIFAR(datasets.CIFAR10):
    """CIFAR-10 in its own format, with the checksums of files that a test writes."""

    train_list: ClassVar[list[list[str]]] = []
    test_list: ClassVar[list[list[str]]] = []
    meta: ClassVar[dict[str, str]] = {"filename": "batches.meta", "key": "label_names"}


def write_cifar(root: Path) -> None:
    folder = root / TinyCIFAR.base_folder
    folder.mkdir()
    rng = np.random.default_rng(0)

    def written(name: str, content: dict[str, Any]) -> str:
        (folder / name).write_bytes(pickle.dumps(content))
        return hashlib.md5((folder / name).read_bytes()).hexdigest()

    for name, n, files in (("data_batch_1", 30, "train_list"), ("test_batch", 10, "test_list")):
        batch = {"data": rng.integers(256, size=(n, 3072), dtype=np.uint8), "labels": [i % 10 for i in range(n)]}
        setattr(TinyCIFAR, files, [[name, written(name, batch)]])
    TinyCIFAR.meta["md5"] = written("batches.meta", {"label_names": [f"class {i}" for i in range(10)]})


def test_cifars_files_are_read_by_a_class_of_ones_own(tmp_path: Path) -> None:
    write_cifar(tmp_path)
    data = made(TinyCIFAR, IID(3), root=tmp_path, download=False)
    assert data.class_names[2] == "class 2"
    assert len(data.client_dataset("server", "test")) == 10  # type: ignore[arg-type]
    assert samples(data, 0)[0][0].shape == (3, 32, 32)


def test_train_and_test_images_are_dealt_together_if_clients_test(tmp_path: Path) -> None:
    write_mnist(tmp_path, train=300, test=100)
    data = made("MNIST", Dirichlet(3, 0.3, min_examples=20), root=tmp_path, test="clients")
    assert data.split_ids("test") == data.client_ids
    assert sum(data.num_examples(cid) for cid in data.client_ids) == 300
    assert sum(len(samples(data, cid, "test")) for cid in data.client_ids) == 100
    for cid in data.client_ids:
        held = [[label for _, label in samples(data, cid, split)] for split in ("train", "test")]
        train, test = (np.bincount(labels, minlength=10) / len(labels) for labels in held)
        assert 0.5 * np.abs(train - test).sum() < 0.35  # of one distribution; other clients are further away


def test_every_client_holds_out_its_own_share(tmp_path: Path) -> None:
    write_folder(tmp_path)
    data = made("ImageFolder", IID(2), root=tmp_path, test=0.25, val_fraction=0.25)
    assert [len(samples(data, 0, split)) for split in ("train", "val", "test")] == [6, 3, 3]
    assert data.class_names == ("cat", "dog")
    everything = [image for s in ("train", "val", "test") for cid in (0, 1) for image, _ in samples(data, cid, s)]
    assert len({image.numpy().tobytes() for image in everything}) == 24
    assert len(made("ImageFolder", IID(2), root=tmp_path).client_dataset(0, "test")) == 1  # type: ignore[arg-type]


def test_a_share_takes_the_place_of_the_servers_test_images(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    data = made("MNIST", IID(2), root=tmp_path, test=0.2)
    assert data.split_ids("test") == [0, 1]
    assert not made("MNIST", IID(2), root=tmp_path, test=0).has_split("test")


class Counted(datasets.ImageFolder):
    reads = 0

    def __getitem__(self, index: int) -> Any:
        Counted.reads += 1
        return super().__getitem__(index)


def test_labels_are_read_without_opening_images(tmp_path: Path) -> None:
    write_folder(tmp_path)
    folder = Counted(tmp_path, target_transform=lambda label: 5 - label)
    assert labels_of(folder).tolist() == [5] * 12 + [4] * 12
    assert labels_of(Subset(folder, [20, 3])).tolist() == [4, 5]
    assert Counted.reads <= 2 * 4  # of each class two, for each of the two questions


@pytest.mark.parametrize("name", ["labels", "_labels", "y", "_samples"])
def test_labels_are_found_wherever_torchvision_keeps_them(name: str) -> None:
    class Kept(datasets.VisionDataset):
        def __init__(self) -> None:
            numbers = [3, 1, 2]
            setattr(self, name, [("path", n) for n in numbers] if name == "_samples" else numbers)
            self.numbers, self.reads = numbers, 0

        def __len__(self) -> int:
            return 3

        def __getitem__(self, index: int) -> Any:
            self.reads += 1
            return None, self.numbers[index]

    kept = Kept()
    assert labels_of(kept).tolist() == [3, 1, 2]
    assert kept.reads == 3  # each is the only one of its class
    kept.numbers = [7, 8, 9]  # samples say otherwise: they are right
    assert labels_of(kept).tolist() == [7, 8, 9]


def test_train_images_are_augmented_and_evaluated_plainly() -> None:
    data = made("FakeData", IID(2), transform=RANDOM, eval_transform=PLAIN, options=FAKE)
    plain = made("FakeData", IID(2), options=FAKE)
    assert type(data.client_dataset(0)) is Augmented
    for ours, theirs in zip(*(d.client_eval_dataloader(0, "train") for d in (data, plain)), strict=True):
        assert torch.equal(ours[0], theirs[0])
    assert torch.equal(samples(data, 0, "test")[0][0], samples(plain, 0, "test")[0][0])
    first, second = (next(iter(data.client_dataloader(0, shuffle=False)))[0] for _ in range(2))
    assert not torch.equal(first, second)


def test_images_that_a_command_holds_out_are_validated_plainly() -> None:
    data = made("FakeData", IID(2), transform=RANDOM, eval_transform=PLAIN, options=FAKE)
    data.hold_out_validation(0.2)
    first, second = (next(iter(data.val_dataloader()))[0] for _ in range(2))
    assert torch.equal(first, second)
    assert {len(data.client_dataset(cid)) + len(data.client_dataset(cid, "val")) for cid in (0, 1)} == {27}


@pytest.mark.parametrize(
    ("arguments", "error", "says"),
    [
        ({"dataset": "CIFAR"}, ValueError, "no 'CIFAR'. Nearest: CIFAR10, CIFAR100"),
        ({"dataset": "zzz"}, ValueError, "no 'zzz'. MNIST, CIFAR10 and ImageFolder are some"),
        ({"dataset": "no.such.Class"}, ValueError, "'no.such.Class', which cannot be imported"),
        ({"dataset": datasets.FakeData(3)}, TypeError, "made already is dealt by FederatedDataModule.from_dataset"),
        ({"options": {"sizes": 3}}, ValueError, "FakeData has no argument 'sizes' .* It has size, image_size"),
        ({"options": {"transform": PLAIN}}, ValueError, "'transform', which is set by transform= and eval_transform="),
        ({"transform": RANDOM}, ValueError, "has RandomCrop, RandomHorizontalFlip, which may draw .* eval_transform="),
        ({"eval_transform": RANDOM}, ValueError, "eval_transform has RandomCrop, RandomHorizontalFlip, which draws"),
        ({"transform": v2.ToImage}, TypeError, r"is the class ToImage. Give an object: ToImage\(...\)"),
        ({"transform": 3}, TypeError, "must be a function of an image such as .* got 3"),
        ({"test": "server"}, ValueError, "'server', but the data set has no test images of its own"),
        ({"test": 1.5}, ValueError, r"Vision.test must be .* got 1.5"),
        ({"test": 0.5, "val_fraction": 0.5}, ValueError, "leave no images to train on"),
        ({"val_fraction": 1.0}, ValueError, "Vision.val_fraction must be non-negative and below 1"),
        ({"splits": {"train": "train"}}, ValueError, "FakeData has no split= or train="),
        ({"dataset": "EMNIST", "options": {}}, ValueError, "EMNIST needs 'split', one of byclass, bymerge, balanced"),
        ({"dataset": "VOCDetection", "options": {}}, ValueError, "VOCDetection has no classes.*from_dataset deals"),
        ({"transform": v2.CutMix(num_classes=3)}, ValueError, "has CutMix, which mixes a batch.* begin training_step"),
        ({"eval_transform": v2.GaussianBlur(3)}, ValueError, "eval_transform has GaussianBlur, which draws"),
        ({"dataset": "SVHN", "options": {}, "splits": {"extra": "extra"}}, ValueError, "must name 'train'"),
        ({"partition": 3}, TypeError, "partition must be a Partition such as IID"),
    ],
)
def test_bad_arguments_are_refused_at_once(arguments: dict[str, Any], error: type[Exception], says: str) -> None:
    usual = {"dataset": "FakeData", "partition": IID(2), "options": FAKE}
    with pytest.raises(error, match=says):
        Vision(**(usual | arguments))


@pytest.mark.parametrize(
    ("transform", "says"),
    [
        (v2.PILToTensor(), "pixels of type torch.uint8; .* Add v2.ToDtype"),
        (v2.Resize(4), r"gives a Image, not a tensor. End it with v2.ToImage\(\)"),
    ],
)
def test_images_that_no_model_takes_are_refused(transform: Any, says: str) -> None:
    with pytest.raises(TypeError, match=says):
        made("FakeData", IID(2), transform=transform, options=FAKE)


def test_an_evaluation_that_draws_random_numbers_is_refused() -> None:
    noisy = v2.Compose([PLAIN, v2.Lambda(lambda image: image + torch.rand(()))])
    with pytest.raises(ValueError, match="eval_transform draws random numbers: it makes different images"):
        made("FakeData", IID(2), transform=PLAIN, eval_transform=noisy, options=FAKE)
    steady = v2.Compose([v2.GaussianBlur(3, sigma=1.0), PLAIN, v2.Lambda(lambda image: 2 * image)])
    made("FakeData", IID(2), transform=steady, eval_transform=steady, options=FAKE)


def test_images_of_unlike_shapes_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path / "a")
    write_folder(tmp_path / "b", size=(12, 12))
    (tmp_path / "b" / "cat").rename(tmp_path / "a" / "bird")
    with pytest.raises(ValueError, match=r"shapes \(3, \d+, \d+\) and .* with v2.Resize\(\(64, 64\)\), or"):
        made("ImageFolder", Dirichlet(3, 0.1), root=tmp_path / "a")
    made("ImageFolder", Dirichlet(3, 0.1), root=tmp_path / "a", transform=v2.Compose([v2.Resize((8, 8)), PLAIN]))


def no_network(*args: Any, **kwargs: Any) -> None:
    raise OSError("Network is unreachable")


@pytest.mark.parametrize(
    ("make", "says"),
    [
        (
            lambda root: made("MNIST", IID(2), root, download=False),
            "could not find MNIST in .*With a network, download",
        ),
        (
            lambda root: made("MNIST", IID(2), root),
            r"could not download MNIST in .*Try again with a network, or copy the folder",
        ),
        (lambda root: made("ImageFolder", IID(2), root / "none"), "could not find ImageFolder .* folder of the images"),
    ],
)
def test_missing_files_are_named_with_what_to_do(
    make: Callable[[Path], object], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(datasets.MNIST, "download", no_network)
    with pytest.raises(FileNotFoundError, match=says) as error:
        make(tmp_path)
    assert str(tmp_path) in str(error.value)


def test_a_download_is_asked_for_only_if_files_are_missing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.MNIST, "download", lambda self: write_mnist(Path(self.root)))
    made("MNIST", IID(2), root=tmp_path)
    monkeypatch.setattr(datasets.MNIST, "download", no_network)
    made("MNIST", IID(2), root=tmp_path)


@pytest.mark.parametrize(
    ("name", "options", "wanted"),
    [
        ("CIFAR100", {}, {"train": True, "test": False}),
        ("EMNIST", {"split": "byclass"}, {"train": True, "test": False}),
        ("SVHN", {}, {"train": "train", "test": "test"}),
        ("DTD", {}, {"train": "train", "val": "val", "test": "test"}),
        ("OxfordIIITPet", {}, {"train": "trainval", "test": "test"}),
        ("FakeData", {}, {"train": None}),
    ],
)
def test_splits_are_those_that_the_data_set_has(name: str, options: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert Vision(name, IID(2), options=options).source.splits == wanted


def test_labels_that_are_no_classes_are_refused(tmp_path: Path) -> None:
    write_folder(tmp_path)
    options = {"target_transform": lambda label: {"box": label}}
    with pytest.raises(
        ValueError, match=r"ImageFolder gives as label \{'box': 0\}; Vision needs pairs of an image and"
    ):
        made("ImageFolder", IID(2), root=tmp_path, options=options)
