"""Data sets of torchvision whose files or options are unusual, and downloads that fail."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.image_files import write_folder, write_mnist, write_pets
from PIL import Image
from torchvision import datasets

from lightning_fed.data.partition import IID, Dirichlet
from lightning_fed.datamodules import Vision


def made(*args: Any, **kwargs: Any) -> Vision:
    data = Vision(*args, **kwargs)
    data.prepare_data()
    data.setup()
    return data


class Parity(datasets.MNIST):
    """Says whether a digit is odd; the stored labels say which it is. The first digit, 0, is 0 in both."""

    @property
    def raw_folder(self) -> str:
        return str(Path(self.root, "MNIST", "raw"))

    def __getitem__(self, index: int) -> Any:
        image, digit = super().__getitem__(index)
        return image, digit % 2


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    ("dataset", "write", "options"),
    [(Parity, write_mnist, {}), ("OxfordIIITPet", write_pets, {"target_types": "binary-category"})],
)
def test_labels_are_those_of_the_samples_also_where_others_are_stored(
    tmp_path: Path, dataset: Any, write: Any, options: dict[str, Any], in_memory: bool
) -> None:
    write(tmp_path)
    rule = Dirichlet(2, 100.0)
    data = made(dataset, rule, tmp_path, options=options, in_memory=in_memory)
    raw = data.source.make("train")
    truth = [label for _, label in raw]
    assert set(truth) == {0, 1}
    for cid, rows in rule(list(raw)).items():  # the partition of the samples, without anything that is stored
        held: Any = data.client_dataset(cid)
        assert [int(label) for _, label in held] == [truth[row] for row in rows]


def test_a_subset_that_an_option_chooses_is_held_out_and_not_tested_on_itself(tmp_path: Path) -> None:
    folder = tmp_path / "QMNIST" / "raw"
    folder.mkdir(parents=True)
    labels = np.zeros((20, 8), dtype=">i4")
    labels[:, 0] = np.arange(20) % 10
    pixels = np.arange(20 * 784).astype(np.uint8)
    (folder / "qmnist-train-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, 20, 28, 28) + pixels.tobytes())
    (folder / "qmnist-train-labels-idx2-int").write_bytes(struct.pack(">3i", 3074, 20, 8) + labels.tobytes())
    data = made("QMNIST", IID(2), tmp_path, options={"what": "train"}, download=False)
    assert data.split_ids("test") == [0, 1]
    assert sum(map(data.num_examples, (0, 1))) == 18


def test_gray_and_coloured_images_make_no_batch(tmp_path: Path) -> None:
    write_folder(tmp_path)
    Image.fromarray(np.zeros((10, 8), dtype=np.uint8)).save(tmp_path / "dog" / "005.png")
    options = {"loader": lambda path: Image.open(path).copy()}  # as it is stored, gray or in colours
    with pytest.raises(ValueError, match=r"shapes \(3, 10, 8\) and \(1, 10, 8\), .* with v2.RGB\(\), or"):
        made("ImageFolder", IID(2), tmp_path, options=options)
    made("ImageFolder", IID(2), tmp_path, options=options, loader_options={"collate_fn": list})


def test_a_class_with_several_names_is_called_by_the_first(tmp_path: Path) -> None:
    for split in ("train", "val"):
        write_folder(tmp_path / "imagenette2-160" / split)
        for name, number in (("cat", "n01440764"), ("dog", "n02102040")):
            (tmp_path / "imagenette2-160" / split / name).rename(tmp_path / "imagenette2-160" / split / number)
    for path in tmp_path.rglob("*.png"):
        path.rename(path.with_suffix(".jpeg"))
    data = made("Imagenette", IID(2), tmp_path, options={"size": "160px"})
    assert data.class_names == ("tench", "English springer")


def test_damaged_files_are_named(tmp_path: Path) -> None:
    write_mnist(tmp_path)
    (tmp_path / "MNIST" / "raw" / "t10k-labels-idx1-ubyte").write_bytes(b"")
    with pytest.raises(ValueError, match=f"MNIST in {tmp_path} cannot be read .* files are damaged: delete them"):
        made("MNIST", IID(2), tmp_path)


def test_a_download_that_breaks_off_leaves_nothing_and_is_begun_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "data"

    def broken(self: datasets.EuroSAT) -> None:
        write_folder(Path(self._data_folder), images=2)  # where torchvision looks, and takes what it finds as complete
        raise ConnectionResetError("The network is gone")

    monkeypatch.setattr(datasets.EuroSAT, "download", broken)
    with pytest.raises(FileNotFoundError, match=f"could not download EuroSAT in {root} .*The network is gone"):
        made("EuroSAT", IID(2), root)
    assert not root.exists()

    def complete(self: datasets.EuroSAT) -> None:
        assert (Path(self._base_folder) / "EuroSAT.zip").read_text() == "put there by hand"
        write_folder(Path(self._data_folder), images=12)

    (root / "eurosat").mkdir(parents=True)
    (root / "eurosat" / "EuroSAT.zip").write_text("put there by hand")
    (root / "another").mkdir()
    monkeypatch.setattr(datasets.EuroSAT, "download", complete)
    data = made("EuroSAT", IID(2), root)
    assert (
        sum(map(data.num_examples, data.client_ids))
        + sum(
            len(data.client_dataset(cid, "test"))  # type: ignore[arg-type]
            for cid in data.split_ids("test")
        )
        == 24
    )
    assert sorted(path.name for path in root.iterdir()) == ["another", "eurosat"]
