"""Small data sets in the format of LEAF's scripts."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

#: user -> x and y, as LEAF's JSON has them
People = Mapping[str, tuple[list[Any], list[Any]]]


def write_shard(path: Path, everybody: People, **other: Any) -> Path:
    """A shard with its table of contents; ``other`` replaces parts of it."""
    shard = {
        "users": list(everybody),
        "num_samples": [len(y) for _, y in everybody.values()],
        "user_data": {user: {"x": x, "y": y} for user, (x, y) in everybody.items()},
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**shard, **other}))
    return path


def write_people(folder: Path, train: People, test: People | None = None) -> Path:
    """A folder as LEAF leaves it behind: ``all_data/``, or ``train/`` and ``test/``."""
    if test is None:
        write_shard(folder / "all_data" / "all_data.json", train)
    else:
        write_shard(folder / "train" / "all_data_niid_0_keep_0_train_9.json", train)
        write_shard(folder / "test" / "all_data_niid_0_keep_0_test_9.json", test)
    return folder


def role(text: str) -> tuple[list[str], list[str]]:
    """All lines of 80 characters of a text, and what follows each."""
    count = len(text) - 80
    return [text[i : i + 80] for i in range(count)], [text[i + 80] for i in range(count)]


def account(*tweets: tuple[str, int]) -> tuple[list[list[str]], list[int]]:
    """Texts and moods as rows of the CSV that Sentiment140 is."""
    rows = [[f"{i}", "Mon Apr 06 22:19:45 PDT 2009", "NO_QUERY", "someone", text] for i, (text, _) in enumerate(tweets)]
    return rows, [mood for _, mood in tweets]


def write_faces(folder: Path, **colours: tuple[int, int, int]) -> Path:
    """Images of one colour each, of CelebA's size, where LEAF expects them."""
    images = folder / "raw" / "img_align_celeba"
    images.mkdir(parents=True, exist_ok=True)
    for name, colour in colours.items():
        Image.fromarray(np.full((218, 178, 3), colour, dtype=np.uint8)).save(images / f"{name}.png")
    return folder


def write_some(name: str, folder: Path) -> Path:
    """Three users of a data set of LEAF, with training and test data."""
    users = ("ann", "bob", "cyd")
    if name == "celeba":
        write_faces(folder, red=(255, 0, 0), blue=(0, 0, 255))
        data: tuple[list[Any], list[Any]] = (["red.png", "blue.png"] * 3, [1.0, 0.0] * 3)
    elif name == "sent140":
        data = account(("good day", 1), ("bad day", 0), ("so good!", 1))
    else:
        data = role("a rose is a rose " * 6)
    return write_people(folder, dict.fromkeys(users, data), dict.fromkeys(users, data))
