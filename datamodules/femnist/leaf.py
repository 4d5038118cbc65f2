"""LEAF's JSON: shards of ``{"users": [...], "num_samples": [...], "user_data": {user: {"x": [[784]], "y": []}}}``."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.datamodules.femnist.characters import CLASSES, PIXELS, Block, DataError
from lightning_fed.datamodules.femnist.jsonstream import JsonError, JsonStream

#: how far, in grey levels, a pixel may lie from a whole one: a little more than three decimals of k/255 leave
EXACT = 0.2


def read(path: Path) -> Iterator[Block]:
    """One block per user and shard; users of ``test/`` are marked as test data."""
    seen: dict[tuple[str, bool | None], Path] = {}
    for file, test in shards(path):
        for user, images, labels in read_shard(file):
            other = seen.setdefault((user, test), file)
            if other != file:
                raise DataError(f"{file}, user {user!r}: is in {other.name} as well. Every user belongs to one shard.")
            marks = None if test is None else np.full(len(labels), test)
            yield Block(user, images, labels, marks)


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


def read_shard(file: Path) -> Iterator[tuple[str, NDArray[np.uint8], NDArray[np.uint8]]]:
    """Yield user, images and labels; at the end compare the shard's table of contents with the data."""
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
                    images, labels = _user(file, user, stream.value())
                    found[user] = len(labels)
                    yield user, images, labels
                    where = f"{file}, after user {user!r}"
                where = f"{file}"
            stream.close()
    except (JsonError, RecursionError, OSError) as error:
        raise DataError(f"{where}: {error}.") from error
    _compare(file, contents, found)


def _user(file: Path, user: str, data: Any) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    where = f"{file}, user {user!r}"
    if not isinstance(data, dict) or not isinstance(data.get("x"), list) or not isinstance(data.get("y"), list):
        raise DataError(f"{where}: wanted lists 'x' and 'y', got {_kind(data)}.")
    x, y = data["x"], data["y"]
    if not y and not x:
        raise DataError(f"{where}: has no data.")
    if len(x) != len(y):
        raise DataError(f"{where}: has {len(x)} images and {len(y)} labels.")
    for i, image in enumerate(x):
        if not isinstance(image, list) or len(image) != PIXELS:
            raise DataError(f"{where}: image {i} must be {PIXELS} numbers, got {_kind(image)}.")
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
        warnings.warn(f"{file}: pixels are not k/255 with whole k, as FEMNIST's are; they are rounded.", stacklevel=2)
    return levels.astype(np.uint8), labels.astype(np.uint8)


def _numbers(where: str, name: str, values: list[Any], rows: list[list[Any]]) -> NDArray[np.float64]:
    try:
        if set(map(type, chain.from_iterable(rows))) <= {int, float}:  # numpy would take True for 1
            return np.asarray(values, dtype=np.float64)
    except OverflowError:
        pass
    raise DataError(f"{where}: {name} must hold numbers only.")


def _compare(file: Path, contents: dict[str, Any], found: dict[str, int]) -> None:
    if not found:
        raise DataError(f"{file}: has no 'user_data', or no users in it.")
    users, counts = contents.get("users", list(found)), contents.get("num_samples", list(found.values()))
    if not isinstance(users, list) or not isinstance(counts, list) or len(users) != len(counts):
        raise DataError(f"{file}: 'users' and 'num_samples' must be lists of one length.")
    if wrong := [user for user in users if not isinstance(user, str)]:
        raise DataError(f"{file}: 'users' must hold names, got {_kind(wrong[0])}.")
    if len(set(users)) != len(users):
        twice = next(user for i, user in enumerate(users) if user in users[:i])
        raise DataError(f"{file}, user {twice!r}: is named twice in 'users'.")
    for user, count in zip(users, counts, strict=True):
        if user not in found:
            raise DataError(f"{file}, user {user!r}: is named in 'users', but has no data.")
        if count != found[user]:
            raise DataError(f"{file}, user {user!r}: has {found[user]} samples, but 'num_samples' says {count}.")
    if missing := set(found) - set(users):
        raise DataError(f"{file}, user {min(missing)!r}: has data, but is not named in 'users'.")


def _json_in(folder: Path) -> list[Path]:
    return sorted(folder.glob("*.json"))


def _kind(value: Any) -> str:
    if isinstance(value, dict):
        return f"an object with {', '.join(map(repr, value)) or 'nothing in it'}"
    return f"{len(value)} of them" if isinstance(value, list) else repr(value)[:40]
