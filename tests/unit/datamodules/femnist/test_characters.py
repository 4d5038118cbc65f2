"""The cache of characters: whole or absent, mapped, converted once, and refused where it is not what it should be."""

import json
import multiprocessing
import os
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.femnist_files import blocks, caches, people, people_of, same, write_leaf, write_split

from lightning_fed.core.cache import default_cache
from lightning_fed.datamodules.femnist import characters, leaf, sources
from lightning_fed.datamodules.femnist.characters import CLASSES, PIXELS, Block, Characters, DataError, build

CACHE = Path("cache")
FOLDER = CACHE / "some"
SOME = people(3, ann=3, bob=1, cyd=2)


def built(**kwargs: Any) -> Characters:
    return build(FOLDER, kwargs.pop("blocks", blocks(SOME)), **{"source": "these", "fingerprint": "f", **kwargs})


def test_what_was_built_is_what_is_opened() -> None:
    for found in (built(core=["bob"]), Characters.open(FOLDER, "f")):
        assert same(people_of(found), SOME)
        assert (found.source, found.generated, found.core) == ("these", False, ["bob"])
        assert found.test is None
        assert [found.rows(k) for k in range(3)] == [range(3), range(3, 4), range(4, 6)]


def test_images_and_labels_are_maps_of_files() -> None:
    found = built()
    assert isinstance(found.images, np.memmap)
    assert isinstance(found.labels, np.memmap)
    assert found.images.nbytes == (FOLDER / "images.u8").stat().st_size == 6 * PIXELS


def test_nothing_that_is_written_into_a_map_reaches_the_file() -> None:
    found = built()
    found.images[:] = 7
    found.labels[:] = 7
    del found
    assert same(people_of(Characters.open(FOLDER, "f")), SOME)


@pytest.mark.parametrize("rows_at_a_time", [1, 2, 4096])
def test_characters_that_come_in_pieces_are_brought_together_by_writer(
    rows_at_a_time: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(characters, "CHUNK", rows_at_a_time)
    more = people(7, bob=2, dan=1, ann=1)
    found = built(blocks=[*blocks(SOME, test=False), *blocks(more, test=True)])
    together = people_of(found)
    assert found.writers == ["ann", "bob", "cyd", "dan"]
    for name in ("ann", "bob"):
        for got, first, second in zip(together[name], SOME[name], more[name], strict=True):
            assert np.array_equal(got, np.concatenate([first, second]))
    assert found.test is not None
    assert found.test.tolist() == [0, 0, 0, 1, 0, 1, 1, 0, 0, 1]
    assert sorted(os.listdir(FOLDER)) == ["images.u8", "labels.u8", "meta.json", "test.u8"]


def bad(**changes: Any) -> Block:
    images, labels = SOME["ann"]
    return Block(**{"writer": "ann", "images": images, "labels": labels, **changes})


@pytest.mark.parametrize(
    ("block", "problem"),
    [
        (bad(images=np.zeros((0, PIXELS), np.uint8), labels=np.zeros(0, np.uint8)), "has no characters"),
        (bad(images=np.zeros((3, 783), np.uint8)), r"3 labels came with images of shape \(3, 783\)"),
        (bad(images=np.zeros((2, PIXELS), np.uint8)), r"3 labels came with images of shape \(2, 784\)"),
        (bad(images=np.zeros((3, PIXELS))), "must be uint8, got float64, uint8"),
        (bad(labels=np.zeros(3, np.int64)), "must be uint8, got uint8, int64"),
        (bad(labels=np.zeros((3, 2), np.uint8)), r"labels .*shape \(3, 2\)"),
        (bad(labels=np.array([0, CLASSES, 1], np.uint8)), "label 62 is not one of 0 to 61"),
        (bad(test=np.zeros(2, bool)), r"3 labels came with test marks of shape \(2,\)"),
        (bad(test=np.zeros(3, bool)), "some writers have a test split, but 'ann' differs"),
    ],
)
def test_a_bad_block_is_refused_by_name_and_nothing_is_left(block: Block, problem: str) -> None:
    with pytest.raises(DataError, match=f"these.*'?ann'?.*{problem}|these: {problem}"):
        built(blocks=[*blocks(people(bob=1)), block])
    assert caches() == []


def test_a_source_without_characters_is_refused() -> None:
    with pytest.raises(DataError, match="these: there are no characters in it"):
        built(blocks=[])
    assert caches() == []


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt(), ZeroDivisionError()])
def test_whatever_stops_the_reader_nothing_half_written_is_left(error: BaseException) -> None:
    def stopping() -> Iterator[Block]:
        yield from blocks(SOME)
        assert caches()  # it is under way
        raise error

    with pytest.raises(type(error)):
        built(blocks=stopping())
    assert caches() == []
    assert same(people_of(built()), SOME)


def test_a_cache_of_another_source_is_refused() -> None:
    built()
    with pytest.raises(DataError, match=r"some: this cache was made from another source \(these\)"):
        Characters.open(FOLDER, "g")


@pytest.mark.parametrize("name", ["images", "labels", "test"])
@pytest.mark.parametrize("damage", ["cut", "grown", "gone"])
def test_a_damaged_file_of_a_cache_is_named(name: str, damage: str) -> None:
    built(blocks=blocks(SOME, test=False))
    file = FOLDER / f"{name}.u8"
    data = file.read_bytes()
    file.unlink() if damage == "gone" else file.write_bytes(data[:-1] if damage == "cut" else data + b"0")
    with pytest.raises(DataError, match=rf"{name}.u8: this cache is damaged: \d+ bytes instead of {len(data)}. Delete"):
        Characters.open(FOLDER, "f")


@pytest.mark.parametrize("name", ["images", "labels", "test"])
def test_a_flipped_bit_in_a_cache_is_noticed_wherever_it_is(name: str) -> None:
    built(blocks=blocks(SOME, test=False))
    file = FOLDER / f"{name}.u8"
    data = file.read_bytes()
    for k in range(0, len(data), max(1, len(data) // 50)):
        flipped = bytearray(data)
        flipped[k] ^= 1
        file.write_bytes(flipped)
        with pytest.raises(DataError, match=rf"{name}.u8: this cache is damaged: its checksum does not match"):
            Characters.open(FOLDER, "f")
    file.write_bytes(data)
    Characters.open(FOLDER, "f")


def test_a_changed_meta_file_is_refused() -> None:
    built()
    meta = FOLDER / "meta.json"
    contents = json.loads(meta.read_text())
    contents["counts"] = contents["counts"][::-1]
    contents["writers"] = [*contents["writers"][1:], contents["writers"][0]]
    meta.write_text(json.dumps(contents))
    with pytest.raises(DataError, match=r"meta\.json: this cache is damaged"):
        Characters.open(FOLDER, "f")


def test_a_cut_meta_file_is_refused_wherever_it_is_cut() -> None:
    built()
    meta = FOLDER / "meta.json"
    text = meta.read_text()
    for k in range(len(text)):
        meta.write_text(text[:k])
        with pytest.raises(DataError, match=r"meta.json: this cache is damaged"):
            Characters.open(FOLDER, "f")


KEYS = ("format", "source", "fingerprint", "generated", "core", "writers", "counts", "split", "digests", "digest")


@pytest.mark.parametrize("key", KEYS)
def test_a_meta_file_that_lacks_something_is_refused(key: str) -> None:
    built()
    meta = FOLDER / "meta.json"
    contents = json.loads(meta.read_text())
    assert set(contents) == set(KEYS)
    del contents[key]
    meta.write_text(json.dumps(contents))
    with pytest.raises(DataError, match=f"meta.json: this cache is damaged.*{key}"):
        Characters.open(FOLDER, "f")


@pytest.mark.parametrize(
    "change",
    [
        {"counts": []},
        {"counts": [3, 1]},
        {"counts": [3, "1", 2]},
        {"counts": [7, -3, 2]},
        {"counts": 6},
        {"counts": [3.5, 1, 1.5]},
        {"writers": ["ann"]},
        {"writers": 3},
        {"writers": ["ann", "ann", "bob"]},
        {"writers": ["ann", ["bob"], "cyd"]},
        {"writers": [], "counts": []},
        {"core": ["eve"]},
        {"core": 1},
    ],
    ids=str,
)
def test_a_meta_file_that_contradicts_itself_is_refused(change: dict[str, Any]) -> None:
    built()
    meta = FOLDER / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), **change}))
    with pytest.raises(DataError, match="this cache is damaged"):
        Characters.open(FOLDER, "f")


@pytest.mark.parametrize("text", ["[]", "3", "null", '"format"', "\x00", "{}"])
def test_a_meta_file_that_is_something_else_is_refused(text: str) -> None:
    built()
    (FOLDER / "meta.json").write_text(text)
    with pytest.raises(DataError, match=r"meta.json: this cache is damaged"):
        Characters.open(FOLDER, "f")


def test_a_cache_of_another_format_is_refused() -> None:
    built()
    meta = FOLDER / "meta.json"
    meta.write_text(json.dumps({**json.loads(meta.read_text()), "format": 0}))
    with pytest.raises(DataError, match="this cache has format 0, wanted 2"):
        Characters.open(FOLDER, "f")


def race(start: Callable[..., Any], barrier: Any) -> None:
    """Two builds into one folder, neither of which ends before both have begun."""

    def waiting() -> Iterator[Block]:
        barrier.wait()
        yield from blocks(SOME)
        barrier.wait()

    racers = [start(target=built, kwargs={"blocks": waiting()}) for _ in range(2)]
    for racer in racers:
        racer.start()
    for racer in racers:
        racer.join()


@pytest.mark.parametrize("kind", ["threads", "processes"])
@pytest.mark.filterwarnings("ignore:.*multi-threaded")
def test_two_builds_at_once_end_with_one_good_cache(kind: str) -> None:
    fork = multiprocessing.get_context("fork")
    start, barrier = (threading.Thread, threading.Barrier) if kind == "threads" else (fork.Process, fork.Barrier)
    race(start, barrier(2, timeout=60))
    assert caches() == ["some"]
    assert same(people_of(Characters.open(FOLDER, "f")), SOME)


def unread(*_: object) -> Iterator[Block]:
    raise AssertionError("the source is read again")


def test_a_source_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_split(Path("femnist"), SOME, people(5, bob=2))
    first = sources.load(source, "auto", CACHE)
    monkeypatch.setitem(sources.READERS, "leaf", unread)
    again = sources.load(source, "auto", CACHE)
    assert same(people_of(again), people_of(first))
    assert len(caches()) == 1


@pytest.mark.parametrize("change", ["contents", "time", "added", "renamed", "gone"])
def test_a_source_that_has_changed_is_converted_anew(change: str) -> None:
    source = Path("femnist")
    first, second = (write_leaf(source / f"all_data_{k}.json", people(k, **{f"w{k}": 2})) for k in range(2))
    before = people_of(sources.load(source, "auto", CACHE))
    stat = first.stat()
    if change == "contents":
        first.write_bytes(first.read_bytes().replace(b"1.0", b"0.0"))
        os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns))
        assert first.stat().st_size == stat.st_size
    elif change == "time":
        os.utime(first, ns=(stat.st_atime_ns, stat.st_mtime_ns + 1))
    elif change == "added":
        write_leaf(source / "all_data_2.json", people(w2=2))
    elif change == "renamed":
        first.rename(source / "all_data_9.json")
    else:
        second.unlink()
    after = people_of(sources.load(source, "auto", CACHE))
    assert len(caches()) == 2
    assert same(before, after) == (change == "time")
    assert same(after, people_of(leaf.read(source)))


def test_a_source_that_cannot_be_read_leaves_nothing_in_the_cache() -> None:
    file = write_leaf(Path("all_data.json"), SOME)
    file.write_bytes(file.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"all_data.json, user 'cyd': the file ends too early"):
        sources.load(file, "auto", CACHE)
    assert caches() == []


def test_a_cache_that_lost_its_meta_file_is_not_taken_for_a_good_one() -> None:
    file = write_leaf(Path("all_data.json"), SOME)
    sources.load(file, "auto", CACHE)
    (meta,) = CACHE.glob("*/meta.json")
    meta.unlink()
    with pytest.raises(DataError, match=r"meta.json: this cache is damaged .*Delete the folder"):
        sources.load(file, "auto", CACHE)
    assert len(caches()) == 1


@pytest.mark.parametrize("kind", ["auto", "leaf", "npz"])
def test_a_path_that_does_not_exist_is_named(kind: str) -> None:
    with pytest.raises(DataError, match=r"nowhere"):
        sources.load(Path("nowhere"), kind, CACHE)
    assert caches() == []


@pytest.mark.parametrize("name", ["empty", "notes/readme.txt", "train/test/x.json", "alone.txt"])
def test_a_path_with_nothing_to_read_says_what_was_wanted(name: str, tmp_path: Path) -> None:
    file = tmp_path / "here" / name
    file.mkdir(parents=True) if name == "empty" else (file.parent.mkdir(parents=True), file.write_text("x"))
    path = file if name == "alone.txt" else tmp_path / "here"
    with pytest.raises(DataError, match=r"(here|alone.txt): found nothing to read in it. Wanted a folder of LEAF JSON"):
        sources.detect(path)


def test_the_cache_lies_where_the_environment_says(
    own_cache: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    assert default_cache() == own_cache
    monkeypatch.delenv("LIGHTNING_FED_CACHE")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert default_cache() == tmp_path / "xdg" / "lightning_fed"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert default_cache() == Path.home() / ".cache" / "lightning_fed"
