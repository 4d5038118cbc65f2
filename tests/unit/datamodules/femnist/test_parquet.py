"""Parquet files of Hugging Face: streamed, labelled, split as their names say, and refused where they are broken."""

import io
import json
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow.parquet import write_table

from lightning_fed.datamodules.femnist import parquet
from lightning_fed.datamodules.femnist.characters import ALPHABET, Block, DataError, build


def picture(seed: int, side: int = 28, form: str = "PNG", mode: str = "L") -> bytes:
    """An image file with one dark spot on white paper."""
    grey = np.full((side, side), 255, dtype=np.uint8)
    x, y = np.random.default_rng(seed).integers(side // 4, side // 2, size=2)
    grey[y : y + side // 4, x : x + side // 4] = seed % 50
    file = io.BytesIO()
    Image.fromarray(grey).convert(mode).save(file, form)
    return file.getvalue()


def rows(text: str = "a:0A b:z a:a9", start: int = 0) -> list[dict]:
    """Rows of the dataset; "a:0A" means that writer a wrote 0 and A."""
    pairs = [(writer, character) for writer, own in (part.split(":") for part in text.split()) for character in own]
    return [
        {"image": {"bytes": picture(k), "path": None}, "writer_id": w, "hsf_id": 0, "character": ALPHABET.index(c)}
        for k, (w, c) in enumerate(pairs, start)
    ]


def save(file: Path, data: list[dict], names: list[str] | None = None) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    features = {"info": {"features": {"character": {"names": names, "_type": "ClassLabel"}}}}
    table = pyarrow.Table.from_pylist(data)
    write_table(table.replace_schema_metadata({"huggingface": json.dumps(features)}) if names else table, file)
    return file


def texts(path: Path) -> list[tuple[str, str]]:
    return [(block.writer, "".join(ALPHABET[label] for label in block.labels)) for block in parquet.read(path)]


def only(path: Path) -> Block:
    (block,) = parquet.read(path)
    return block


def test_a_file_gives_a_block_for_each_writer() -> None:
    assert texts(save(Path("x.parquet"), rows(), list(ALPHABET))) == [("a", "0Aa9"), ("b", "z")]


def test_characters_may_be_numbers_or_letters() -> None:
    numbers = rows(f"a:{ALPHABET}")
    letters = [row | {"character": ALPHABET[row["character"]]} for row in numbers]
    for data in (numbers, letters):
        assert only(save(Path("x.parquet"), data)).labels.tolist() == list(range(62))


def test_writers_may_be_numbers() -> None:
    data = [row | {"writer_id": 7} for row in rows("a:0A")]
    assert texts(save(Path("x.parquet"), data)) == [("7", "0A")]


def test_files_of_a_folder_come_in_the_order_of_their_names_also_below_data() -> None:
    save(Path("set/data/train-00001-of-00002.parquet"), rows("c:2"))
    save(Path("set/data/train-00000-of-00002.parquet"), rows("b:1"))
    save(Path("set/.cache/train-00000-of-00002.parquet"), rows("b:1"))
    blocks = list(parquet.read(Path("set")))
    assert [block.writer for block in blocks] == ["b", "c"]
    assert [block.test for block in blocks] == [None, None]


def test_a_file_is_read_in_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS", 3)
    assert texts(save(Path("x.parquet"), rows())) == [("a", "0A"), ("b", "z"), ("a", "a9")]


def test_the_cache_brings_writers_and_their_split_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, "ROWS", 3)
    save(Path("set/train-0.parquet"), rows())
    save(Path("set/test-0.parquet"), rows("b:7 a:8", start=20))
    built = build(tmp_path / "cache", parquet.read(Path("set")), source="x", fingerprint="1")
    found = {
        writer: [("T" if built.test[i] else "") + ALPHABET[built.labels[i]] for i in built.rows(k)]
        for k, writer in enumerate(built.writers)
    }
    assert found == {"b": ["T7", "z"], "a": ["T8", "0", "A", "a", "9"]}
    first = built.rows(built.writers.index("a"))[1]
    assert built.images[first].tolist() == list(Image.open(io.BytesIO(picture(0))).tobytes())


def test_a_file_that_is_neither_train_nor_test_is_refused_beside_them() -> None:
    for name in ("train-0", "test-0", "validation-0"):
        save(Path(f"set/{name}.parquet"), rows())
    with pytest.raises(DataError, match=r"set: is validation-0.parquet for training or for testing\? Name it train-"):
        texts(Path("set"))


def test_pixels_stay_as_they_are_with_white_paper() -> None:
    image = only(save(Path("x.parquet"), rows("a:0"))).images[0]
    assert image.tolist() == list(Image.open(io.BytesIO(picture(0))).tobytes())
    assert image[0] == 255
    assert image.min() == 0


@pytest.mark.parametrize("mode", ["L", "RGB", "P", "RGBA"])
def test_large_pictures_of_any_mode_are_made_small_as_for_nist(mode: str) -> None:
    data = picture(3, side=128, mode=mode)
    expected = Image.open(io.BytesIO(data)).convert("L")
    expected.thumbnail((28, 28), Image.LANCZOS)
    file = save(Path("x.parquet"), [rows("a:0")[0] | {"image": {"bytes": data, "path": "x.png"}}])
    assert only(file).images[0].tolist() == list(expected.tobytes())


def test_jpeg_is_read_too() -> None:
    data = picture(3, form="JPEG")
    file = save(Path("x.parquet"), [rows("a:0")[0] | {"image": {"bytes": data, "path": None}}])
    assert only(file).images[0].tolist() == list(Image.open(io.BytesIO(data)).tobytes())


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"image": {"bytes": b"no picture", "path": None}}, "x.parquet, writer 'a': cannot be decoded as an image"),
        ({"image": {"bytes": None, "path": "a.png"}}, r"x.parquet, writer 'a': column 'image' must hold the bytes"),
        ({"image": None}, r"x.parquet, writer 'a': column 'image' must hold the bytes .* got None"),
        ({"image": "a.png"}, r"x.parquet, writer 'a': column 'image' must hold the bytes .* got 'a.png'"),
        ({"writer_id": None}, r"x.parquet: a row has no writer_id"),
        ({"character": 62}, r"x.parquet, writer 'a': 'character' must be 0 to 61 or one of 0123.*, got 62"),
        ({"character": -1}, r"'character' must be .*, got -1"),
        ({"character": None}, r"'character' must be .*, got None"),
        ({"character": "AB"}, r"'character' must be .*, got 'AB'"),
        ({"character": "?"}, r"'character' must be .*, got '\?'"),
        ({"character": ""}, r"'character' must be .*, got ''"),
    ],
)
def test_a_row_that_makes_no_sense_is_refused(change: dict, message: str) -> None:
    with pytest.raises(DataError, match=message):
        texts(save(Path("x.parquet"), [rows("a:0")[0] | change]))


def test_missing_columns_are_named() -> None:
    data = [{"pixels": 1, "writer_id": "a", "character": 0}]
    with pytest.raises(DataError, match=r"x.parquet: wanted the columns image, writer_id, character, image is not in"):
        texts(save(Path("x.parquet"), data))


def test_classes_in_another_order_are_refused() -> None:
    with pytest.raises(DataError, match=r"x.parquet: the classes of 'character' must be 0123.* in this order"):
        texts(save(Path("x.parquet"), rows(), list(ALPHABET.swapcase())))


def test_a_truncated_file_is_refused() -> None:
    file = save(Path("x.parquet"), rows())
    file.write_bytes(file.read_bytes()[:-20])
    with pytest.raises(DataError, match=r"x.parquet: is not a whole Parquet file .* get it anew"):
        texts(file)


def test_a_missing_part_is_named() -> None:
    save(Path("set/train-00000-of-00002.parquet"), rows())
    with pytest.raises(DataError, match=r"set: train-00001-of-00002.parquet is missing, while other parts are there"):
        texts(Path("set"))


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_a_folder_without_files_is_refused(name: str) -> None:
    Path("empty").mkdir()
    with pytest.raises(DataError, match=f"{name}: wanted a .parquet file, or a folder with some, and found none"):
        texts(Path(name))


def test_without_pyarrow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    file = save(Path("x.parquet"), rows())
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    with pytest.raises(DataError, match=r'pyarrow is needed. Install it with: pip install "lightning-fed\[huggingface'):
        texts(file)


class Hub:
    """Stands for huggingface_hub: writes a file, none, or fails."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, error: Exception | None = None, files: int = 1) -> None:
        self.error, self.files, self.asked = error, files, []
        monkeypatch.setitem(sys.modules, "huggingface_hub", SimpleNamespace(snapshot_download=self.download))

    def download(self, name: str, *, repo_type: str, allow_patterns: str, local_dir: str) -> None:
        self.asked.append((name, repo_type, allow_patterns))
        if self.error:
            raise self.error
        for k in range(self.files):
            save(Path(local_dir, f"data/train-{k:05d}-of-{self.files:05d}.parquet"), rows())


def test_a_dataset_is_downloaded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = Hub(monkeypatch)
    for _ in range(2):
        parquet.download(Path("set"))
    assert hub.asked == [("flwrlabs/femnist", "dataset", "*.parquet")]
    assert texts(Path("set")) == [("a", "0Aa9"), ("b", "z")]


def test_a_download_that_was_interrupted_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    save(Path("set/data/train-00001-of-00002.parquet"), rows())
    Hub(monkeypatch, files=2)
    parquet.download(Path("set"))
    assert len(texts(Path("set"))) == 4


def test_a_download_that_lacks_a_part_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    save(Path("set/data/train-00001-of-00002.parquet"), rows())
    Hub(monkeypatch, files=0)
    with pytest.raises(DataError, match=r"'me/chars' came without train-00000-of-00002.parquet"):
        parquet.download(Path("set"), "me/chars")


def test_one_part_may_be_read_by_itself() -> None:
    assert texts(save(Path("train-00000-of-00002.parquet"), rows("a:0"))) == [("a", "0")]


@pytest.mark.parametrize("error", [OSError("no route"), RuntimeError("no route")])
def test_without_network_the_error_names_the_dataset_and_the_folder(
    error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    Hub(monkeypatch, error)
    with pytest.raises(DataError, match=r"'me/chars' could not be downloaded \(no route\).* into set by hand"):
        parquet.download(Path("set"), "me/chars")


def test_a_dataset_without_parquet_files_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    Hub(monkeypatch, files=0)
    with pytest.raises(DataError, match=r"'me/chars' came without .parquet files. Check the network"):
        parquet.download(Path("set"), "me/chars")


def test_a_download_without_the_extra_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "huggingface_hub", None)
    with pytest.raises(DataError, match=r'huggingface_hub is needed. Install it with: pip install "lightning-fed\['):
        parquet.download(Path("set"))
