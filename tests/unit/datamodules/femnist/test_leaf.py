"""LEAF's JSON: read a user at a time in every layout, and refused with file, user and problem where it is malformed."""

import json
import math
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.femnist_files import (
    SHARED,
    caches,
    needs_shared_data,
    people,
    people_of,
    same,
    shard,
    write_leaf,
    write_split,
)

from lightning_fed.datamodules import FEMNIST
from lightning_fed.datamodules.femnist import jsonstream, leaf, sources
from lightning_fed.datamodules.femnist.characters import DataError

SOME = people(3, ann=3, bob=2)
OTHERS = people(4, cyd=1, dan=2)
SOURCE = Path("all_data_0.json")


@pytest.mark.parametrize("place", ["", "all_data", "train", "data/femnist"])
def test_shards_are_found_in_every_layout_and_read_in_the_order_of_their_names(place: str) -> None:
    folder = Path("leaf") / place
    write_leaf(folder / "all_data_1.json", OTHERS)
    write_leaf(folder / "all_data_0.json", SOME)
    source = folder if place == "data/femnist" else Path("leaf")
    assert sources.detect(source) == "leaf"
    assert same(people_of(leaf.read(source)), {**SOME, **OTHERS})
    assert all(block.test is None for block in leaf.read(source))


def test_train_and_test_folders_are_the_split() -> None:
    found = sources.load(write_split(Path("leaf"), SOME, {"bob": OTHERS["cyd"], **OTHERS}), "auto", Path("cache"))
    assert found.writers == ["ann", "bob", "cyd", "dan"]
    assert found.test is not None
    assert found.test.tolist() == [0, 0, 0, 0, 0, 1, 1, 1, 1]
    assert np.array_equal(people_of(found)["bob"][1], [*SOME["bob"][1], *OTHERS["cyd"][1]])


@pytest.mark.parametrize("empty", ["train", "test"])
def test_a_split_with_one_empty_side_is_refused(empty: str) -> None:
    folder = write_split(Path("leaf"), SOME, OTHERS)
    next((folder / empty).iterdir()).unlink()
    with pytest.raises(DataError, match=f"leaf/{empty}: has no JSON files in it"):
        sources.load(folder, "leaf", Path("cache"))


def test_the_order_of_keys_and_unknown_ones_do_not_matter() -> None:
    contents = shard(SOME)
    turned = {key: contents[key] for key in reversed(contents)} | {"hierarchies": [["x"], {"deep": [1, None]}]}
    SOURCE.write_text(json.dumps(turned, indent=3))
    assert same(people_of(leaf.read(SOURCE)), SOME)


def test_a_shard_without_a_table_of_contents_is_read() -> None:
    SOURCE.write_text(json.dumps({"user_data": shard(SOME)["user_data"]}))
    assert same(people_of(leaf.read(SOURCE)), SOME)


def test_users_that_leafs_split_left_without_data_and_name_are_left_out() -> None:
    contents = shard(SOME)
    contents["user_data"]["one"] = {"x": [], "y": []}
    SOURCE.write_text(json.dumps(contents))
    assert same(people_of(leaf.read(SOURCE)), SOME)


@pytest.mark.parametrize("decimals", [3, 4, 6, 17])
def test_grey_levels_survive_the_rounding_of_the_writer(decimals: int) -> None:
    contents = shard(SOME)
    for data in contents["user_data"].values():
        data["x"] = np.round(data["x"], decimals).tolist()
    SOURCE.write_text(json.dumps(contents))
    assert same(people_of(leaf.read(SOURCE)), SOME)


def test_pixels_between_grey_levels_are_rounded_with_a_warning() -> None:
    contents = shard(SOME)
    contents["user_data"]["ann"]["x"][0][5] = 100.4 / 255
    SOURCE.write_text(json.dumps(contents))
    with pytest.warns(UserWarning, match=r"all_data_0.json: pixels are not k/255"):
        assert people_of(leaf.read(SOURCE))["ann"][0][0, 5] == 100


def test_only_a_user_at_a_time_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(jsonstream, "CHUNK", 1 << 14)
    write_leaf(SOURCE, people(**{f"w{k}": 10 for k in range(40)}))
    tracemalloc.start()
    try:
        for k, block in enumerate(leaf.read(SOURCE)):
            assert block.writer == f"w{k}"
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert k == 39
    assert peak < SOURCE.stat().st_size * 0.75  # as Python's floats the whole shard would be five times its text


def set_pixel(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda contents: contents["user_data"]["bob"]["x"][1].__setitem__(7, value)


def set_label(value: Any) -> Callable[[dict[str, Any]], None]:
    return lambda contents: contents["user_data"]["bob"]["y"].__setitem__(1, value)


def set_bob(**data: Any) -> Callable[[dict[str, Any]], None]:
    return lambda contents: contents["user_data"]["bob"].update(data)


def set_all(**parts: Any) -> Callable[[dict[str, Any]], None]:
    return lambda contents: contents.update(parts)


IMAGE = [1.0] * 784
BOB = r"all_data_0.json, user 'bob': "
SHARD = r"all_data_0.json: "
MALFORMED = {
    "NaN pixel": (set_pixel(math.nan), BOB + "pixel 7 of image 1 is nan; pixels lie in"),
    "infinite pixel": (set_pixel(math.inf), BOB + "pixel 7 of image 1 is inf"),
    "dark pixel": (set_pixel(-0.001), BOB + "pixel 7 of image 1 is -0.001"),
    "pixel just above white": (set_pixel(1.001), BOB + "pixel 7 of image 1 is 1.001"),
    "bright pixel": (set_pixel(255), BOB + "pixel 7 of image 1 is 255"),
    "pixel as text": (set_pixel("1.0"), BOB + "x must hold numbers only"),
    "no pixel": (set_pixel(None), BOB + "x must hold numbers only"),
    "pixel as a truth": (set_pixel(True), BOB + "x must hold numbers only"),
    "pixel as a list": (set_pixel([1.0]), BOB + "x must hold numbers only"),
    "enormous pixel": (set_pixel(10**30), BOB + ".*"),
    "nested pixels": (set_bob(x=[[[2.0]] * 784] * 2), BOB + "x must hold numbers only"),
    "truths": (set_bob(x=[[True] * 784] * 2), BOB + "x must hold numbers only"),
    "label too large": (set_label(62), BOB + "label 62 is not one of 0 to 61"),
    "negative label": (set_label(-1), BOB + "label -1 is not one of 0 to 61"),
    "label between": (set_label(1.5), BOB + "label 1.5 is not one of 0 to 61"),
    "NaN label": (set_label(math.nan), BOB + "label nan is not one of 0 to 61"),
    "label as text": (set_label("A"), BOB + "y must hold numbers only"),
    "label as a truth": (set_label(True), BOB + "y must hold numbers only"),
    "nested labels": (set_bob(y=[[1], [2]]), BOB + "y must hold numbers only"),
    "pairs of labels": (set_bob(y=[[1, 2], [2, 3]]), BOB + "y must hold numbers only"),
    "enormous label": (set_label(10**30), BOB + ".*"),
    "short image": (set_bob(x=[IMAGE, IMAGE[1:]]), BOB + "image 1 must be 784 numbers, got 783 of them"),
    "long image": (set_bob(x=[IMAGE, [*IMAGE, 1.0]]), BOB + "image 1 must be 784 numbers, got 785 of them"),
    "image in rows": (set_bob(x=[IMAGE, [[1.0] * 28] * 28]), BOB + "image 1 must be 784 numbers, got 28 of them"),
    "image as a number": (set_bob(x=[1.0, 1.0]), BOB + "image 0 must be 784 numbers, got 1.0"),
    "image as text": (set_bob(x=["0" * 784] * 2), BOB + "image 0 must be 784 numbers, got '000"),
    "more labels": (set_bob(y=[1, 2, 3]), BOB + "has 2 images and 3 labels"),
    "fewer labels": (set_bob(y=[1]), BOB + "has 2 images and 1 labels"),
    "no labels": (set_bob(y=[]), BOB + "has 2 images and 0 labels"),
    "no data": (set_bob(x=[], y=[]), BOB + "has no data"),
    "labels as an object": (set_bob(y={"0": 1}), BOB + "wanted lists 'x' and 'y'"),
    "user without x": (lambda c: c["user_data"]["bob"].pop("x"), BOB + "wanted lists 'x' and 'y', got .* 'y'"),
    "user as a list": (lambda c: c["user_data"].update(bob=[1, 2]), BOB + "wanted lists 'x' and 'y', got 2 of them"),
    "user as nothing": (lambda c: c["user_data"].update(bob=None), BOB + "wanted lists 'x' and 'y', got None"),
    "user without data": (lambda c: c["user_data"].pop("bob"), BOB + "is named in 'users', but has no data"),
    "user without a name": (
        set_all(users=["ann"], num_samples=[3]),
        BOB + "has data, but is not named in 'users'",
    ),
    "user named twice": (set_all(users=["ann", "bob", "bob"], num_samples=[3, 2, 2]), BOB + "is named twice"),
    "wrong count": (set_all(num_samples=[3, 3]), BOB + "has 2 samples, but 'num_samples' says 3"),
    "count as text": (set_all(num_samples=[3, "2"]), BOB + "has 2 samples, but 'num_samples' says '?2"),
    "too few counts": (set_all(num_samples=[3]), SHARD + "'users' and 'num_samples' must be lists of one length"),
    "users as text": (set_all(users="ab"), SHARD + "'users'.*must be lists of one length"),
    "users as numbers": (set_all(users=[1, 2]), SHARD + ".*'users'"),
    "users as number and text": (set_all(users=["1", 1]), SHARD + ".*'users'"),
    "users as lists": (set_all(users=["ann", ["bob"]]), SHARD + ".*'users'"),
    "nobody": (set_all(users=[], num_samples=[], user_data={}), SHARD + "has no 'user_data', or no users in it"),
    "no user_data": (lambda contents: contents.pop("user_data"), SHARD + "has no 'user_data'"),
    "user_data as a list": (set_all(user_data=[1]), SHARD + r"wanted '\{', got '\['"),
}


@pytest.mark.parametrize(("spoil", "message"), MALFORMED.values(), ids=MALFORMED)
def test_malformed_data_are_refused_by_file_user_and_problem(
    spoil: Callable[[dict[str, Any]], Any], message: str
) -> None:
    contents = shard(SOME)
    spoil(contents)
    SOURCE.write_text(json.dumps(contents))
    with pytest.raises(DataError, match=f"^{message}"):
        sources.load(SOURCE, "auto", Path("cache"))
    assert caches() == []


def test_a_user_who_is_there_twice_in_a_shard_is_refused() -> None:
    text = json.dumps(shard(SOME))
    again = json.dumps(shard(SOME)["user_data"]["bob"])
    SOURCE.write_text(f'{text[:-2]}, "b\\u006fb": {again}}}}}')
    with pytest.raises(DataError, match=f"^{BOB}occurs twice"):
        sources.load(SOURCE, "auto", Path("cache"))
    assert caches() == []


@pytest.mark.parametrize("split", [False, True])
def test_a_user_who_is_in_two_shards_is_refused(split: bool) -> None:
    folder = write_split(Path("leaf"), SOME, SOME) if split else write_leaf(Path("leaf/all_data_0.json"), SOME).parent
    shards = folder / "train" if split else folder
    write_leaf(shards / "all_data_1.json", {"bob": OTHERS["dan"]})
    with pytest.raises(DataError, match=r"all_data_\d.*json, user 'bob': is in all_data_\d.*json as well"):
        sources.load(folder, "auto", Path("cache"))
    assert caches() == []


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        (b"", r"wanted '\{', got the end of the file"),
        (b"  \n", r"wanted '\{', got the end of the file"),
        (b"[]", r"wanted '\{', got '\['"),
        (b"\x89PNG", r"wanted '\{', got"),
        (b"\xef\xbb\xbf{}", r"wanted '\{', got"),
        (b'{"users": [}', "it is not JSON"),
        (b'{"users": ["a" "b"]}', "it is not JSON"),
        (b'{"users": [1], users}', "wanted a name in quotes, got 'u'"),
        (b'{"users": 1, }', r"wanted a name in quotes, got '\}'"),
        (b'{"users" [1]}', r"wanted ':', got '\['"),
        (b'{"users": }', r"wanted a value, got '\}'"),
        (b'{"users": [1] [2]}', r"wanted ',' or '\}' after the value of 'users', got '\['"),
        (b'{"users": "a', "the file ends too early"),
        (b'{"users": "a\\', "the file ends too early"),
        (b'{"users": [[1]', "the file ends too early"),
        (b'{"users": ["\xff"]}', "it is not JSON"),
        (b'{"users": 1\x00}', "it is not JSON"),
        (b'{"users": [1]}{', r"there is more after the end of the object: '\{'"),
        (b'{"users": ' + b"[" * 200_000 + b"]" * 200_000 + b"}", ".*recursion"),
        (b'{"user_data": {"bob": ' + b'{"x":' * 200_000 + b"1" + b"}" * 200_000 + b"}}", ".*recursion"),
        (b'{"user_data": {"bob": {"x": [[1, 2', "the file ends too early"),
        (b'{"user_data": {"bob": {"x": [[1, 2}', "the file ends too early"),
        (b'{"user_data": {"bob": {"x": [[1, 2}]}}}', "it is not JSON"),
    ],
)
def test_text_that_is_not_json_is_refused_by_file_and_problem(text: bytes, problem: str) -> None:
    SOURCE.write_bytes(text)
    user = ", user 'bob'" if b"bob" in text else ""
    with pytest.raises(DataError, match=rf"all_data_0.json{user}: {problem}"):
        sources.load(SOURCE, "auto", Path("cache"))
    assert caches() == []


def test_a_folder_that_is_named_like_a_shard_is_refused() -> None:
    (Path("leaf") / "all_data_0.json").mkdir(parents=True)
    with pytest.raises(DataError, match=r"all_data_0.json|leaf"):
        sources.load(Path("leaf"), "auto", Path("cache"))


@needs_shared_data
def test_the_sample_of_leaf_equals_the_npz() -> None:
    data = FEMNIST(SHARED / "leaf_sample")
    data.prepare_data()
    data.setup()
    assert len(data.client_ids) == len(data.split_ids("test")) == 8
    with np.load(SHARED / "unipen62_by_writer.npz", allow_pickle=False) as npz:
        names, owner, images, labels = (npz[key] for key in ("writer_names", "writer", "images", "labels"))
        marks = npz["is_test"]
    for name in data.client_ids:
        (k,) = np.flatnonzero(names == name)
        for split, count in (("train", 36), ("test", 6)):
            x, y = (np.stack(part) for part in zip(*data.client_dataset(name, split), strict=True))
            mine = (owner == k) & (marks == (split == "test"))
            theirs = {image.tobytes(): label for image, label in zip(255 - images[mine], labels[mine], strict=True)}
            assert x.shape == (count, 784)
            for image, label in zip(np.rint(x * 255).astype(np.uint8), y, strict=True):
                assert theirs[image.tobytes()] == label
