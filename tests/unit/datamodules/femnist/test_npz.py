"""An npz by writer: turned to LEAF's polarity, grouped by writer, and refused where its arrays do not fit together."""

import pickle
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.femnist_files import (
    SHARED,
    arrays,
    blocks,
    caches,
    needs_shared_data,
    people,
    people_of,
    same,
    write_npz,
)

from lightning_fed.datamodules import FEMNIST
from lightning_fed.datamodules.femnist import npz, sources
from lightning_fed.datamodules.femnist.characters import Characters, DataError

SOME = people(3, ann=3, bob=1, cyd=2)
SOURCE = Path("writers.npz")


def contents(**changes: Any) -> dict[str, Any]:
    """The arrays of a good file, but for some; None leaves one out."""
    changed = {**arrays(SOME), **changes}
    return {name: array for name, array in changed.items() if array is not None}


def load(**changes: Any) -> Characters:
    return sources.load(write_npz(SOURCE, contents(**changes)), "auto", Path("cache"))


@pytest.mark.parametrize("shape", [(6, 28, 28), (6, 784)])
def test_ink_on_black_becomes_ink_on_white(shape: tuple[int, ...]) -> None:
    found = load(images=arrays(SOME)["images"].reshape(shape))
    assert same(people_of(found), SOME)
    assert (found.images[:, 0] == 255).all()
    assert (found.test, found.core, found.generated) == (None, None, False)


def test_characters_may_be_mixed_and_stay_in_their_order_within_each_writer() -> None:
    order = np.array([4, 0, 3, 1, 5, 2])  # cyd ann bob ann cyd ann
    mixed = {name: array[order] if len(array) == 6 else array for name, array in arrays(SOME).items()}
    assert same(people_of(load(**mixed)), SOME)
    assert [block.writer for block in npz.read(SOURCE)] == [block.writer for block in blocks(SOME)]


@pytest.mark.parametrize("dtype", [bool, np.uint8, np.int64])
def test_marks_of_test_data_and_core_writers_are_kept(dtype: type) -> None:
    marks = np.array([0, 1, 0, 0, 1, 0], dtype=dtype)
    found = load(is_test=marks, writer_core=np.array([1, 0, 1], dtype=dtype))
    assert found.test is not None
    assert found.test.tolist() == marks.astype(bool).tolist()
    assert found.core == ["ann", "cyd"]


@pytest.mark.parametrize("dtype", ["u1", "i1", "u2", "i8", "u8", ">i4"])
def test_labels_and_owners_may_be_whole_numbers_of_any_width(dtype: str) -> None:
    source = arrays(SOME)
    assert same(people_of(load(labels=source["labels"].astype(dtype), writer=source["writer"].astype(dtype))), SOME)


IMAGES = arrays(SOME)["images"]
MALFORMED: dict[str, tuple[dict[str, Any], str]] = {
    "no images": ({"images": None}, "has no array 'images'; it has labels, writer, writer_names"),
    "no labels": ({"labels": None}, "has no array 'labels'"),
    "no owners": ({"writer": None}, "has no array 'writer'"),
    "no names": ({"writer_names": None}, "has no array 'writer_names'"),
    "images as floats": ({"images": IMAGES / 255}, "images must be uint8.* got float64"),
    "wide images": ({"images": np.zeros((6, 32, 32), np.uint8)}, r"images must be uint8.*got uint8 of shape \(6, 32"),
    "too few images": ({"images": IMAGES[1:]}, r".*one for each of 6 labels; got uint8 of shape \(5, 28, 28\)"),
    "one image": ({"images": IMAGES[0]}, "images must be uint8 of shape"),
    "too few labels": ({"labels": np.zeros(5, int)}, ".*one for each of 5 labels"),
    "labels in columns": (
        {"labels": np.zeros((6, 1), int)},
        r"labels must be a row of whole numbers, got int64 of shape \(6, 1\)",
    ),
    "one label": ({"labels": np.int64(3)}, r"labels must be a row of whole numbers, got int64 of shape \(\)"),
    "labels as floats": ({"labels": np.zeros(6)}, "labels must be a row of whole numbers, got float64"),
    "labels as text": ({"labels": np.array(list("012345"))}, "labels must be a row of whole numbers, got <U1"),
    "label too large": ({"labels": np.array([0, 0, 0, 62, 0, 0])}, "writer 'bob': labels must lie in 0 to 61, got 62"),
    "negative label": ({"labels": np.array([0, 0, 0, -1, 0, 0])}, "writer 'bob': labels must lie in 0 to 61, got -1"),
    "large label": ({"labels": np.array([0, 0, 0, 256, 0, 0])}, "writer 'bob': labels .* got 256"),
    "too few owners": (
        {"writer": np.zeros(5, int)},
        r"writer must name one writer for each of 6 characters, got shape \(5,\)",
    ),
    "owners as floats": ({"writer": np.zeros(6)}, "writer must be a row of whole numbers, got float64"),
    "unknown owner": ({"writer": np.array([0, 0, 1, 2, 3, 0])}, "character 4: writer must lie in 0 to 2, got 3"),
    "negative owner": ({"writer": np.array([0, 0, 1, 2, -1, 0])}, "character 4: writer must lie in 0 to 2, got -1"),
    "writer without data": ({"writer": np.array([0, 0, 0, 2, 2, 2])}, "writer 'bob': has no characters"),
    "last writer without data": ({"writer": np.array([0, 0, 0, 0, 1, 1])}, "writer 'cyd': has no characters"),
    "writer twice": ({"writer_names": np.array(["ann", "bob", "ann"])}, "writer_names must be different strings"),
    "names as bytes": ({"writer_names": np.array([b"ann", b"bob", b"cyd"])}, "writer_names must be .*strings, got .S3"),
    "names as numbers": ({"writer_names": np.arange(3)}, "writer_names must be different strings, got int64"),
    "names in rows": (
        {"writer_names": np.array([["ann", "bob", "cyd"]])},
        r"writer_names .* got <U3 of shape \(1, 3\)",
    ),
    "names as objects": ({"writer_names": np.array(["ann", "bob", None])}, "cannot be read as npz .*pickle"),
    "too few marks": ({"is_test": np.zeros(5, bool)}, r"is_test must be 6 truths, got bool of shape \(5,\)"),
    "marks as text": ({"is_test": np.array(["no"] * 6)}, "is_test must be 6 truths, got <U2"),
    "too few core": ({"writer_core": np.zeros(2, bool)}, r"writer_core must be 3 truths, got bool of shape \(2,\)"),
    "core by name": ({"writer_core": np.array(["ann"] * 3)}, "writer_core must be 3 truths, got <U3"),
    "nothing at all": (
        {
            "images": np.zeros((0, 28, 28), np.uint8),
            "labels": np.zeros(0, int),
            "writer": np.zeros(0, int),
            "writer_names": np.array([], dtype="U3"),
        },
        "writer_names must be different strings",
    ),
}


@pytest.mark.parametrize(("changes", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_arrays_are_refused_by_file_and_problem(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=rf"^writers.npz(: |, ){message}"):
        load(**changes)
    assert caches() == []


def spoilt(how: str) -> None:
    data = write_npz(SOURCE, contents()).read_bytes()
    if how == "an archive of something else":
        with zipfile.ZipFile(SOURCE, "w") as archive:
            archive.writestr("readme.txt", "hello")
        return
    if how == "members that are not arrays":
        with zipfile.ZipFile(SOURCE, "w") as archive:
            for name in contents():
                archive.writestr(f"{name}.npy", "hello")
        return
    if how == "one array":
        with SOURCE.open("wb") as file:
            np.save(file, np.zeros(3))
        return
    middle = len(data) // 2
    SOURCE.write_bytes(
        {
            "nothing": b"",
            "text": b"hello",
            "pickle": pickle.dumps([1]),
            "cut": data[:middle],
            "scratched": data[:middle] + b"hello" + data[middle + 5 :],
        }[how]
    )


SPOILT = "nothing,text,pickle,cut,scratched,one array,an archive of something else,members that are not arrays"


@pytest.mark.parametrize("how", SPOILT.split(","))
def test_a_file_that_is_no_npz_is_refused(how: str) -> None:
    spoilt(how)
    with pytest.raises(DataError, match=r"^writers.npz: "):
        sources.load(SOURCE, "auto", Path("cache"))
    assert caches() == []


def test_a_source_that_is_named_wrongly_is_refused() -> None:
    write_npz(SOURCE, contents())
    with pytest.raises(DataError, match=r"writers.npz: wanted '{', got 'P'"):
        sources.load(SOURCE, "leaf", Path("cache"))
    with pytest.raises(DataError, match=r"cannot be read as npz"):
        sources.load(Path(), "npz", Path("cache"))
    assert caches() == []


@needs_shared_data
def test_the_shared_file_is_read_whole_and_once(monkeypatch: pytest.MonkeyPatch) -> None:
    path = SHARED / "unipen62_by_writer.npz"
    found = sources.load(path, "auto", Path("cache"))
    assert (len(found.writers), len(found.labels), len(found.core or [])) == (316, 104_353, 152)
    assert found.test is not None
    assert np.median(found.images[::97]) == 255
    for k in range(316):
        held = found.rows(k)
        assert found.test[held].sum() == max(1, round(len(held) / 10))
    monkeypatch.setitem(sources.READERS, "npz", None)
    data = FEMNIST(path, selection={"core": True}, writers=5)
    data.setup()
    assert len(data.client_ids) == 5
    assert set(data.client_ids) <= set(found.core or [])
