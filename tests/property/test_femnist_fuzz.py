"""Whatever is in a file of LEAF or an npz: it is read as it is, or refused with a DataError; nothing else happens."""

import io
import json
import math
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import pytest
from helpers.femnist_files import arrays, characters, people, people_of, same, shard, write_npz
from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_fed.datamodules.femnist import jsonstream, sources
from lightning_fed.datamodules.femnist.characters import CLASSES, Characters, DataError
from lightning_fed.datamodules.femnist.jsonstream import JsonError, JsonStream
from lightning_fed.datamodules.femnist.selection import select, split_by_sample, split_by_user

quick = settings(deadline=None, max_examples=200)
slow = settings(deadline=None, max_examples=40)

chunks = st.integers(1, 50)
names = st.text(st.characters(exclude_categories=()), max_size=8)  # zeros and lone surrogates as well
numbers = st.integers(-(2**63), 2**64 - 1) | st.floats(allow_nan=False, allow_infinity=False)
values = st.recursive(
    st.none() | st.booleans() | numbers | names,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(names, inner, max_size=4),
    max_leaves=12,
)


@contextmanager
def chunked(size: int) -> Iterator[None]:
    """Files are read so many bytes at a time."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(jsonstream, "CHUNK", size)
        yield


def loaded(data: bytes, name: str = "all_data.json") -> Characters:
    """Read a file and check that the cache is whole if that went well, and empty if not."""
    with TemporaryDirectory() as folder:
        file, cache = Path(folder) / name, Path(folder) / "cache"
        file.write_bytes(data)
        try:
            found = sources.load(file, "auto", cache)
        except DataError as error:
            left = list(cache.iterdir()) if cache.exists() else []
            if left or name not in str(error):
                raise AssertionError(f"left {left}, and says {error}") from error
            raise
        assert len(list(cache.iterdir())) == 1
    return found


def check(found: Characters) -> None:
    assert found.writers
    assert found.labels.max() < CLASSES
    assert found.images.shape == (len(found.labels), 784)


def texts(value: Any, draw: Any) -> str:
    """JSON with space anywhere, any order of keys, and escapes or none."""
    space = draw(st.text(" \t\r\n", max_size=3))
    if isinstance(value, dict):
        items = draw(st.permutations(list(value.items())))
        inside = ",".join(f"{texts(key, draw)}:{texts(item, draw)}" for key, item in items)
        return f"{space}{{{inside}{space}}}{space}"
    if isinstance(value, list) and len(value) < 20:
        return f"{space}[{','.join(texts(item, draw) for item in value)}{space}]"
    if isinstance(value, str):
        plain = draw(st.booleans()) and not any("\ud800" <= character <= "\udfff" for character in value)
        return space + json.dumps(value, ensure_ascii=not plain) + space
    return json.dumps(value, indent=draw(st.sampled_from([None, 1])))


@st.composite
def federations(draw: Any) -> tuple[Any, bytes]:
    """Writers with any names, and a text that says what they wrote."""
    rng = np.random.default_rng(draw(st.integers(0, 99)))
    everybody = {
        name: characters(rng, draw(st.integers(1, 2))) for name in draw(st.lists(names, min_size=1, unique=True))[:3]
    }
    contents = shard(everybody)
    for data in contents["user_data"].values():
        if draw(st.booleans()):  # paper and ink as whole numbers, labels with a point
            data["x"] = [[int(pixel) if pixel in (0, 1) else pixel for pixel in image] for image in data["x"]]
            data["y"] = [float(label) for label in data["y"]]
    # lists of users follow the order that the keys are written in, so it does not matter which
    return everybody, texts(contents, draw).encode()


@slow
@given(federations(), chunks)
def test_any_federation_that_is_written_as_json_is_read_back_exactly(federation: tuple[Any, bytes], size: int) -> None:
    everybody, text = federation
    with chunked(size):
        found = people_of(loaded(text))
    assert set(found) == set(everybody)
    assert list(found) == list(json.loads(text)["user_data"])
    assert same(found, {name: everybody[name] for name in found})


@quick
@given(values, chunks, st.sampled_from([None, 1]), st.booleans())
@example([1e400, -0.0, 0, -1, 1e-320], 1, None, True)
@example({"\ud800": '"\\'}, 1, None, True)
def test_a_stream_takes_any_value_for_what_json_takes_it(
    value: Any, size: int, indent: int | None, ascii: bool
) -> None:
    text = json.dumps({"a": value, "b": 1}, indent=indent, ensure_ascii=ascii).encode("utf-8", "surrogatepass")
    if not ascii and any(0xD800 <= ord(character) <= 0xDFFF for character in text.decode("utf-8", "surrogatepass")):
        return  # that is not UTF-8, and refused
    with chunked(size):
        stream = JsonStream(io.BytesIO(text))
        found = {key: stream.value() for key in stream.members()}
        stream.close()
    assert repr(found) == repr(json.loads(text))


def whole_number(text: str) -> int | float:
    return int(text) if -(2**63) <= int(text) < 2**64 else float(text)  # larger ones come as floats


@quick
@given(
    st.binary(max_size=30) | st.text('{}[]":,\\ 0123456789.eE+-ntrufalsyNI\t\n', max_size=30).map(str.encode), chunks
)
@example(b"1\f", 1)
@example(b"1\x00", 1)
@example(b'"\xed\xa0\x80"', 1)
@example(b"18446744073709551617", 1)
def test_any_bytes_are_taken_for_what_json_takes_them_or_refused(text: bytes, size: int) -> None:
    whole = b'{"a":' + text + b"}"
    try:
        expected = repr(json.loads(whole.decode(), parse_int=whole_number))
    except ValueError:
        expected = "refused"
    with chunked(size):
        stream = JsonStream(io.BytesIO(whole))
        try:
            found = repr({key: stream.value() for key in stream.members()})
            stream.close()
        except JsonError:
            found = "refused"
    assert found == expected


@st.composite
def mutations(draw: Any, length: int) -> Any:
    """A few changes to a text: where, how many bytes fall out, and what comes in."""
    piece = st.binary(max_size=3) | st.sampled_from(
        [b'"', b"{", b"]", b",", b"0", b"-", b"NaN", b"null", b"[1]", b"\\"]
    )
    place = st.integers(0, length) | st.integers(0, min(length, 120)) | st.integers(max(0, length - 120), length)
    gone = st.integers(0, 3) | st.integers(0, length)
    return draw(st.lists(st.tuples(place, gone, piece), min_size=1, max_size=3))


def mutated(text: bytes, changes: Any) -> bytes:
    for place, gone, piece in changes:
        text = text[:place] + piece + text[place + gone :]
    return text


VALID = json.dumps(shard(people(1, ann=1, bob=2))).encode().replace(b"1.0, ", b"1,")
ZIPPED = io.BytesIO()
np.savez_compressed(ZIPPED, **arrays(people(1, ann=2, bob=3)), is_test=[0, 1, 0, 0, 1], writer_core=[True, False])


@settings(deadline=None, max_examples=300)
@given(mutations(len(VALID)), chunks.map(lambda size: size * 100))
def test_a_mutated_shard_is_read_or_refused(changes: Any, size: int) -> None:
    with chunked(size), warnings.catch_warnings():
        warnings.filterwarnings("ignore", ".*pixels are not k/255")
        with suppress(DataError):
            check(loaded(mutated(VALID, changes)))


@settings(deadline=None, max_examples=300)
@given(mutations(len(ZIPPED.getvalue())))
def test_a_mutated_npz_is_read_or_refused(changes: Any) -> None:
    with suppress(DataError):
        check(loaded(mutated(ZIPPED.getvalue(), changes), "writers.npz"))


ARRAYS = arrays(people(1, ann=2, bob=3)) | {"is_test": np.zeros(5, bool), "writer_core": np.ones(2, bool)}
kinds = st.sampled_from(["u1", "i2", "i8", "f4", "?", "U3", "S2", "c8", "M8[s]"])
shapes = st.lists(st.sampled_from([0, 1, 2, 5, 28, 784]), max_size=3).filter(lambda shape: math.prod(shape) < 5000)


@settings(deadline=None, max_examples=120)
@given(st.dictionaries(st.sampled_from(sorted(ARRAYS)), st.none() | st.tuples(kinds, shapes), min_size=1))
def test_an_npz_of_other_arrays_is_read_or_refused(changes: dict[str, Any]) -> None:
    contents: dict[str, Any] = dict(ARRAYS)
    for name, change in changes.items():
        if change is None:
            del contents[name]
        else:
            contents[name] = np.zeros(change[1], dtype=change[0])
    file = io.BytesIO()
    write_npz(file, contents)  # type: ignore[arg-type]
    with suppress(DataError):
        check(loaded(file.getvalue(), "writers.npz"))


@quick
@given(
    st.dictionaries(names, st.integers(1, 12), min_size=1, max_size=6),
    st.integers(0, 3),
    st.floats(0.05, 1),
    st.floats(0.05, 1),
)
def test_the_choice_and_the_splits_obey_their_rules(
    counts: dict[str, int], seed: int, fraction: float, train_fraction: float
) -> None:
    ends = np.cumsum(list(counts.values()))
    n = int(ends[-1])
    nothing = np.zeros(0, np.uint8)
    source = Characters("these", False, list(counts), ends, nothing, nothing, None, None)
    if math.floor(fraction * n) > 0:
        rows = select(source, fraction=fraction, seed=seed)
        assert list(rows) == [name for name in counts if name in rows]
        assert sum(map(len, rows.values())) == math.floor(fraction * n)
        assert sum(len(held) < counts[name] for name, held in rows.items()) <= 1
    for wanted in range(1, len(counts) + 1):
        assert len(select(source, writers=wanted, seed=seed)) == wanted
    rows = select(source, seed=seed)
    train, test = split_by_sample(rows, train_fraction, seed)
    assert list(train) == [name for name, count in counts.items() if count >= 2]
    for name in train:
        count = counts[name]
        assert len(train[name]) == (1 if count == 2 else max(1, math.floor(train_fraction * count)))
        together = [*train[name], *test.get(name, [])]
        assert sorted(together) == rows[name].tolist()
    train, test = split_by_user(rows, train_fraction, seed)
    assert len(train) == max(1, math.floor(train_fraction * len(counts)))
    assert sorted([*train, *test]) == sorted(counts)
