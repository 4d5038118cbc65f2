"""LEAF's JSON: shards of ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784]], "y": []}}}``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_fed.datamodules.femnist.characters import CLASSES, PIXELS, Block, DataError
from lightning_fed.datamodules.femnist.jsonstream import JsonError, JsonStream

#: how far, in grey levels, a pixel may lie from a whole one: a little more than three decimals of k/255 leave
EXACT = 0.2


class Entry(NamedTuple):
    """What a shard says of one user, unread but for the numbers of its samples."""

    file: Path
    user: str
    test: bool | None
    x: list[Any]
    y: list[Any]

    @property
    def where(self) -> str:
        """The file and the user, as errors begin."""
        return f"{self.file}, user {self.user!r}"


def read(path: Path) -> Iterator[Block]:
    """One block per user and shard; users of ``test/`` are marked as test data."""
    for entry in entries(path, "images"):
        images, labels = _characters(entry)
        yield Block(entry.user, images, labels, None if entry.test is None else np.full(len(labels), entry.test))


def entries(path: Path, samples: str, overcount: int = 0) -> Iterator[Entry]:
    """One entry per user and shard, of any of LEAF's data sets; one shard's text of one user is in memory at a time.

    Args:
        path: the folder, or a shard.
        samples: what errors call the samples.
        overcount: so many samples too many may be in the table of contents of a test shard.
    """
    seen: dict[tuple[str, bool | None], Path] = {}
    for file, test in shards(path):
        for user, x, y in read_shard(file, samples, overcount if test else 0):
            other = seen.setdefault((user, test), file)
            if other != file:
                raise DataError(f"{file}, user {user!r}: is in {other.name} as well. Every user belongs to one shard.")
            yield Entry(file, user, test, x, y)


def shards(path: Path) -> list[tuple[Path, bool | None]]:
    """The files at ``path`` in the order of their names, and whether they hold test data, if that is known."""
    if path.is_file():
        return [(path, None)]
    if (path / "train").is_dir() and (path / "test").is_dir():
        named = [(file, split == "test") for split in ("train", "test") for file in _json_in(path / split)]
        for split, test in (("train", False), ("test", True)):
            if all(mark != test for _, mark in named):
                raise DataError(f"{path / split}: has no JSON files in it.")
        return list(named)
    folder = next((f for f in (path / "all_data", path / "train", path) if f.is_dir() and _json_in(f)), None)
    if folder is None:
        raise DataError(f"{path}: has no LEAF shards in it: no *.json, train/*.json or all_data/*.json.")
    return [(file, None) for file in _json_in(folder)]


def read_shard(file: Path, samples: str, overcount: int = 0) -> Iterator[tuple[str, list[Any], list[Any]]]:
    """Yield user, x and y; at the end compare the shard's table of contents with the data."""
    found: dict[str, int] = {}
    contents: dict[str, Any] = {}
    where = f"{file}"
    try:
        with file.open("rb") as opened:
            stream = JsonStream(opened)
            for key in stream.members():
                if key != "user_data":
                    contents[key] = stream.value()
                    continue
                for user in stream.members():
                    where = f"{file}, user {user!r}"
                    if user in found:
                        raise DataError(f"{where}: occurs twice.")
                    x, y = _lists(where, stream.value(), samples)
                    found[user] = len(y)
                    if y:
                        yield user, x, y
                    where = f"{file}, after user {user!r}"
                where = f"{file}"
            stream.close()
    except (JsonError, RecursionError, OSError) as error:
        raise DataError(f"{where}: {error}.") from error
    _compare(file, contents, found, overcount)


def _lists(where: str, data: Any, samples: str) -> tuple[list[Any], list[Any]]:
    if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
        raise DataError(f"{where}: wanted lists 'x' and 'y', got {shown(data)}.")
    x, y = data["x"], data["y"]
    if len(x) != len(y):
        raise DataError(f"{where}: has {len(x)} {samples} and {len(y)} labels.")
    return x, y


def _characters(entry: Entry) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    where, x, y = entry.where, entry.x, entry.y
    for i, image in enumerate(x):
        if not isinstance(image, list) or len(image) != PIXELS:
            raise DataError(f"{where}: image {i} must be {PIXELS} numbers, got {shown(image)}.")
    pixels = _numbers(where, "x", x, rows=x)
    if not ((pixels >= 0) & (pixels <= 1)).all():
        i, j = np.argwhere(~((pixels >= 0) & (pixels <= 1)))[0]
        raise DataError(f"{where}: pixel {j} of image {i} is {pixels[i, j]}; pixels lie in [0, 1].")
    labels = _numbers(where, "y", y, rows=[y])
    wrong = ~((labels >= 0) & (labels < CLASSES) & (labels == np.rint(labels)))
    if wrong.any():
        raise DataError(f"{where}: label {labels[wrong][0]:g} is not one of 0 to {CLASSES - 1}.")
    grey = pixels * 255
    levels = np.rint(grey)
    if np.abs(grey - levels).max() > EXACT:
        warnings.warn(
            f"{entry.file}: pixels are not k/255 with whole k, as FEMNIST's are; they are rounded.", stacklevel=2
        )
    return levels.astype(np.uint8), labels.astype(np.uint8)


def _numbers(where: str, name: str, values: list[Any], rows: list[list[Any]]) -> NDArray[np.float64]:
    try:
        if set(map(type, chain.from_iterable(rows))) <= {int, float}:  # numpy would take True for 1
            return np.asarray(values, dtype=np.float64)
    except OverflowError:
        pass
    raise DataError(f"{where}: {name} must hold numbers only.")


def _compare(file: Path, contents: dict[str, Any], found: dict[str, int], overcount: int) -> None:
    if not found:
        raise DataError(f"{file}: has no 'user_data', or no users in it.")
    users, counts = contents.get("users", list(found)), contents.get("num_samples", list(found.values()))
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise DataError(f"{file}: 'users' and 'num_samples' must be lists of one length.")
    if wrong := [user for user in users if not isinstance(user, str)]:
        raise DataError(f"{file}: 'users' must hold names, got {shown(wrong[0])}.")
    if len(set(users)) != len(users):
        twice = next(user for i, user in enumerate(users) if user in users[:i])
        raise DataError(f"{file}, user {twice!r}: is named twice in 'users'.")
    for user, count in zip(users, counts, strict=True):
        if user not in found:
            raise DataError(f"{file}, user {user!r}: is named in 'users', but has no data.")
        if not found[user]:
            raise DataError(f"{file}, user {user!r}: has no data.")
        if count not in (found[user], found[user] + overcount):
            raise DataError(f"{file}, user {user!r}: has {found[user]} samples, but 'num_samples' says {count}.")
    # LEAF's split by sample leaves users with a single sample in 'user_data', without data and without a name
    if missing := {user for user in found if found[user]} - set(users):
        raise DataError(f"{file}, user {min(missing)!r}: has data, but is not named in 'users'.")


def _json_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def shown(value: Any) -> str:
    """A value of a wrong kind, as errors show it."""
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, value)) or 'nothing in it'}"
    return f"{len(value)} of them" if isinstance(value, list) else repr(value)[:40]
