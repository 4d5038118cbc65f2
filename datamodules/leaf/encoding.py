"""Turn what LEAF's JSON says of a user into numbers, by the rules of LEAF's own models."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fed.datamodules.femnist.characters import DataError
from lightning_fed.datamodules.femnist.jsonstream import JsonError, JsonStream
from lightning_fed.datamodules.femnist.leaf import Entry, shown

#: LEAF's alphabet of Shakespeare; the class of a character is its place.
ALL_LETTERS = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
#: Characters of a sample of Shakespeare, words of a tweet, and height and width of a face.
LINE, WORDS, SIDE = 80, 25, 84

Arrays = tuple[NDArray[Any], NDArray[np.int64]]

# LEAF's str.find gives -1 for other characters, and its one-hot vector of -1 is that of the last letter.
_PLACES = np.full(0x110000, len(ALL_LETTERS) - 1, dtype=np.uint8)
_PLACES[[ord(letter) for letter in ALL_LETTERS]] = range(len(ALL_LETTERS))


def letters(text: str) -> NDArray[np.uint8]:
    r"""The place of every character in LEAF's alphabet; unknown characters have the last place, that of ``}``.

    >>> letters("\n !~}").tolist()
    [0, 1, 2, 79, 79]
    """
    places: NDArray[np.uint8] = _PLACES[np.frombuffer(text.encode("utf-32-le", "surrogatepass"), dtype="<u4")]
    return places


def lines(entry: Entry) -> Arrays:
    """Rows of 80 characters, and the character that follows each."""
    for name, texts, length in (("x", entry.x, LINE), ("y", entry.y, 1)):
        for i, text in enumerate(texts):
            if not isinstance(text, str) or len(text) != length:
                got = f"{len(text)} characters" if isinstance(text, str) else shown(text)
                raise DataError(f"{entry.where}: {name}[{i}] must be a text of length {length}, got {got}.")
    return letters("".join(entry.x)).reshape(-1, LINE), letters("".join(entry.y)).astype(np.int64)


def faces(entry: Entry) -> Arrays:
    """Names of image files, and 1 for those who smile."""
    for i, name in enumerate(entry.x):
        if not isinstance(name, str) or not name:
            raise DataError(f"{entry.where}: x[{i}] must be the name of an image file, got {shown(name)}.")
    return np.array(entry.x), _zero_or_one(entry)


class Words:
    """Number the words of tweets in the order in which they come; 0 is a place without a word."""

    def __init__(self) -> None:
        self.numbers = {"": 0}

    def tweets(self, entry: Entry) -> Arrays:
        """Rows of the first 25 words of each tweet, and 1 for those in a good mood."""
        rows = np.zeros((len(entry.x), WORDS), dtype=np.int32)
        for i, row in enumerate(entry.x):
            if not isinstance(row, list) or len(row) < 5 or not isinstance(row[4], str):
                raise DataError(
                    f"{entry.where}: x[{i}] must be LEAF's row of a tweet (id, date, query, user, text), got"
                    f" {shown(row)}."
                )
            words = split(row[4])[:WORDS]
            rows[i, : len(words)] = [self.numbers.setdefault(word, len(self.numbers)) for word in words]
        return rows, _zero_or_one(entry)

    def most_frequent(self, rows: Iterable[NDArray[Any]], most: int) -> list[str]:
        """The words that are most frequent in these rows; of equally frequent ones the first in the alphabet."""
        counts = np.zeros(len(self.numbers), dtype=np.int64)
        for part in rows:
            np.add.at(counts, part.ravel(), 1)
        found = [word for word, number in self.numbers.items() if word and counts[number]]
        return sorted(found, key=lambda word: (-counts[self.numbers[word]], word))[:most]

    def places(self, vocabulary: Sequence[str], unknown: int) -> NDArray[np.int32]:
        """By our number of a word its place in a vocabulary; ``unknown`` for other words and for no word."""
        places = np.full(len(self.numbers), unknown, dtype=np.int32)
        for place, word in enumerate(vocabulary):
            if number := self.numbers.get(word):
                places[number] = place
        return places


def split(text: str) -> list[str]:
    """The words of a text, and its marks; LEAF's rule, which keeps capitals.

    >>> split("I'm @home, yes :)")
    ["I'm", 'home', ',', 'yes']
    """
    return re.findall(r"[\w']+|[.,!?;]", text)


def read_vocabulary(file: Path) -> list[str]:
    """The words of ``{"vocab": [...]}``, which may be LEAF's ``embs.json``: its embeddings are not read."""
    words: Any = None
    try:
        with file.open("rb") as opened:
            stream = JsonStream(opened)
            for key in stream.members():
                words = stream.value()
                if key == "vocab":
                    break
            else:
                words = None
    except (JsonError, RecursionError, OSError) as error:
        raise DataError(f"{file}: the vocabulary cannot be read: {error}.") from error
    if not isinstance(words, list) or not words or not all(isinstance(word, str) for word in words):
        raise DataError(f'{file}: wanted a vocabulary, {{"vocab": [words, ...]}}, as LEAF\'s get_embs.py writes it.')
    if len(set(words)) < len(words):
        raise DataError(f"{file}: the vocabulary has {len(words) - len(set(words))} words more than once.")
    return words


class Faces(Dataset[tuple[Tensor, int]]):
    """Image files, opened when they are needed: RGB, 84 x 84, in [0, 1]."""

    def __init__(self, folder: Path, names: NDArray[Any], targets: NDArray[np.int64]) -> None:
        self.folder, self.names, self.targets = folder, names, torch.from_numpy(targets)

    def __len__(self) -> int:
        return len(self.names)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        file = self.folder / str(self.names[index])
        try:
            with Image.open(file) as image:
                pixels = np.array(image.resize((SIDE, SIDE)).convert("RGB"))
        except OSError as error:
            raise DataError(f"{file}: cannot be read as an image: {error}. Copy CelebA's images again.") from error
        return torch.from_numpy(pixels).permute(2, 0, 1).float() / 255, int(self.targets[index])


def _zero_or_one(entry: Entry) -> NDArray[np.int64]:
    for label in entry.y:
        if isinstance(label, bool) or label not in (0, 1, "0", "1"):  # LEAF's reader takes text, too
            raise DataError(f"{entry.where}: label {label!r} is not 0 or 1.")
    return np.array([int(label) for label in entry.y], dtype=np.int64)
