"""LEAF's Shakespeare, Sentiment140 and CelebA."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.utils.data import Dataset, Subset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import below_one, is_whole, one_of, whole
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.partition import hold_out
from lightning_fed.data.tensor_loader import TensorRows, row_by_row
from lightning_fed.data.validation_share import VAL_FRACTION
from lightning_fed.datamodules.femnist.characters import DataError
from lightning_fed.datamodules.femnist.leaf import Entry, entries, shards
from lightning_fed.datamodules.leaf.encoding import (
    ALL_LETTERS,
    LINE,
    Arrays,
    Faces,
    Words,
    faces,
    lines,
    read_vocabulary,
)

Name = Literal["shakespeare", "sent140", "celeba"]
Users = dict[str, Arrays]

#: What errors call the samples, and the names of the classes.
SAMPLES = {"shakespeare": "lines", "sent140": "tweets", "celeba": "images"}
CLASSES = {
    "shakespeare": tuple({"\n": "newline", " ": "space"}.get(letter, letter) for letter in ALL_LETTERS),
    "sent140": ("negative", "positive"),
    "celeba": ("not smiling", "smiling"),
}
#: Samples between training and test data that LEAF leaves out where samples are overlapping lines of one text. Its
#: tables of contents count them, though.
GAP = LINE - 1

ADVICE = (
    "LEAF makes the data: in data/{0} of a clone of github.com/TalwalkarLab/leaf, run"
    " ./preprocess.sh -s niid --sf 0.2 -k 0 -t sample, and give the folder data/{0}/data."
)
SPARE = f"Of overlapping lines, {GAP} are left out before the test data, so that a larger share may be needed."


class Leaf(FederatedDataModule):
    """Shakespeare, Sentiment140 or CelebA, from the JSON that LEAF's ``preprocess.sh`` writes; one client per user.

    A sample of "shakespeare" is 80 characters as numbers, and the one that follows, for
    :class:`~lightning_fed.models.ShakespeareLSTM`; of "sent140" 25 words as numbers, and 0 or 1 for the mood, for
    :class:`~lightning_fed.models.Sent140LSTM`; of "celeba" 3 x 84 x 84 pixels in [0, 1], and 1 for a smile, for
    :class:`~lightning_fed.models.CelebaCNN`.

    Characters are numbered by LEAF's alphabet of 80; one that is not in it counts as the last, ``}``, as in LEAF. Words
    keep their capitals, longer tweets are cut, and shorter ones are filled with the unknown word. Faces are read when
    they are needed; ``loader_options={"num_workers": 2}`` reads them in other processes.

    Args:
        dataset: "shakespeare", "sent140" or "celeba".
        folder: LEAF's ``data/<dataset>/data``, with ``train/*.json`` and ``test/*.json``, or with ``all_data/*.json``.
        clients: how many users to draw of those that have training data and ``min_samples``; None takes all.
        min_samples: users with fewer samples, training and test together, are left out.
        test_fraction: what every user tests on, if the folder has no ``test/``: random samples, or the end of a text.
        vocabulary: of tweets: the number of words, which are those most frequent in the training data of all
            clients, or a file ``{"vocab": [...]}``, such as LEAF's ``embs.json``, whose embeddings are not used.
            The unknown word has the number after the last: ``data.words``.
        images: the folder of the faces; ``raw/img_align_celeba`` in ``folder`` by default.
        loading: ``seed`` (0; of the draw of clients and of test samples), and arguments of
            :class:`~lightning_fed.FederatedDataModule`: ``batch_size`` (10), ``eval_batch_size`` (512),
            ``val_fraction`` (by default none), ``drop_last``, ``sampler`` and ``loader_options``.

    Lines of Shakespeare overlap. Test and validation data are therefore the end of a user's text, after a gap of 79
    lines, as LEAF's newer scripts split it; a user whose text is too short for that only trains.

    >>> import json, pathlib, tempfile
    >>> line = {"x": ["To be, or not to be".ljust(80)] * 3, "y": ["T", "h", "~"]}
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     shard = {"users": ["HAMLET"], "num_samples": [3], "user_data": {"HAMLET": line}}
    ...     _ = pathlib.Path(folder, "all_data.json").write_text(json.dumps(shard))
    ...     data = Leaf("shakespeare", folder, test_fraction=0.0)
    ...     data.setup()
    >>> x, y = next(iter(data.client_eval_dataloader("HAMLET", "train")))
    >>> x.shape, x[0, :5].tolist(), y.tolist()
    (torch.Size([3, 80]), [44, 67, 1, 54, 57], [44, 60, 79])

    Reference: arXiv:1812.01097.
    """

    def __init__(
        self,
        dataset: Name,
        folder: str | Path,
        clients: int | None = None,
        min_samples: int = 0,
        test_fraction: float = 0.1,
        vocabulary: int | str | Path = 10_000,
        images: str | Path | None = None,
        **loading: Any,
    ) -> None:
        seed = loading.pop("seed", 0)
        super().__init__(
            None,
            loading.pop("val_fraction", 0.0),
            None,
            batch_size=loading.pop("batch_size", 10),
            eval_batch_size=loading.pop("eval_batch_size", 512),
            **loading,
        )
        self.dataset, self.folder, self.clients, self.min_samples = dataset, Path(folder), clients, min_samples
        self.test_fraction, self.seed = test_fraction, seed
        self.vocabulary = vocabulary if is_whole(vocabulary) else Path(str(vocabulary))
        self.images = self.folder / "raw" / "img_align_celeba" if images is None else Path(images)
        one_of(self, "dataset", tuple(SAMPLES))
        whole(self, "clients", 1, optional=True)
        whole(self, "min_samples", 0)
        whole(self, "seed")
        below_one(self, "test_fraction", "It is the share of its samples that a user tests on.")
        if is_whole(vocabulary):
            whole(self, "vocabulary", 1)
        self.class_names = CLASSES[dataset]
        # plain values, as checkpoints can hold them; functions are left out
        folder, images = str(folder), None if images is None else str(images)
        vocabulary = vocabulary if is_whole(vocabulary) else str(vocabulary)
        loading.update(batch_size=self.batch_size, eval_batch_size=self.eval_batch_size)
        loading.update(seed=seed, val_fraction=self.val_fraction)
        self.save_hyperparameters(ignore=["sampler", "loader_options"])

    @cached_property
    def words(self) -> int:
        """The size of the vocabulary of tweets, which is the number of the unknown word: ``Sent140LSTM(words=...)``."""
        return self.vocabulary if is_whole(self.vocabulary) else len(read_vocabulary(Path(str(self.vocabulary))))

    def setup(self, stage: str | None = None) -> None:
        if self.has_split("train"):
            return
        words = Words()
        train, test = self._split(*self._chosen(*self._read(words)))
        samples = self._samples(train, test, words)
        self.set_split("train", {user: samples(*data) for user, data in train.items()})
        if test:
            self.set_split("test", {user: samples(*data) for user, data in test.items()}, strangers=True)
        counts = [sum(len(y) for _, y in users.values()) for users in (train, test)]
        self.description = (
            f"LEAF's {self.dataset} ({len(train)} clients, {counts[0]} train, {counts[1]} test {SAMPLES[self.dataset]})"
        )

    def hold_out_validation(self, fraction: float = VAL_FRACTION) -> None:
        """As of any data; of overlapping lines the end of a user's text is held out, after a gap."""
        if self.dataset != "shakespeare":
            return super().hold_out_validation(fraction)
        if not 0 < fraction < 1:
            raise ValueError(f"The share to hold out for validation must lie in (0, 1), got {fraction!r}. Try 0.1.")
        train: dict[ClientId, Dataset[Any]] = {}
        val: dict[ClientId, Dataset[Any]] = {}
        for user, held in self._members("train").items():
            left, last = _end(self.num_examples(user), fraction)
            train[user] = Subset(held, left)
            if last:
                val[user] = Subset(held, last)
        if not val:
            raise ValueError(f"val_fraction is {fraction}, but no user has samples to spare. {SPARE}")
        self.splits = {**self.splits, "train": train, "val": val}
        return None

    def _read(self, words: Words) -> tuple[Users, Users]:
        """Training and test data by user; where the folder has no split, all are training data."""
        encode: Callable[[Entry], Arrays] = {"shakespeare": lines, "sent140": words.tweets, "celeba": faces}[
            self.dataset
        ]
        try:
            shards(self.folder)
        except DataError as error:
            problem = error if self.folder.exists() else f"{self.folder}: there is no such folder."
            raise DataError(f"{problem} {ADVICE.format(self.dataset)}") from error
        train: Users = {}
        test: Users = {}
        for entry in entries(self.folder, SAMPLES[self.dataset], GAP if self.dataset == "shakespeare" else 0):
            (test if entry.test else train)[entry.user] = encode(entry)
        return train, test

    def _chosen(self, train: Users, test: Users) -> tuple[Users, Users]:
        """The users that ``min_samples`` and ``clients`` leave; of those without training data all that are left."""
        counts = Counter({user: len(y) for user, (_, y) in train.items()})
        counts.update({user: len(y) for user, (_, y) in test.items()})
        train = {user: data for user, data in train.items() if counts[user] >= self.min_samples}
        if not train:
            raise DataError(
                f"{self.folder}: no user has training data and {self.min_samples} samples. Lower min_samples."
            )
        if self.clients is not None:
            if self.clients > len(train):
                raise DataError(
                    f"Leaf.clients is {self.clients}, but {self.folder} has {len(train)} users to draw from."
                )
            names = list(train)  # by position: an array of names would lose zeros at their ends
            order = numpy_generator(self.seed, "clients").permutation(len(names))[: self.clients]
            left = {user for user in names if user not in {names[i] for i in order}}
            train = {user: data for user, data in train.items() if user not in left}
            test = {user: data for user, data in test.items() if user not in left}
        return train, {user: data for user, data in test.items() if counts[user] >= self.min_samples}

    def _split(self, train: Users, test: Users) -> tuple[Users, Users]:
        """Make a split where the folder has none."""
        if not self.test_fraction or shards(self.folder)[0][1] is not None:
            return train, test
        parts = {user: self._cut(user, len(y)) for user, (_, y) in train.items()}
        if not any(held for _, held in parts.values()):
            raise DataError(f"Leaf.test_fraction is {self.test_fraction}, but no user has samples to spare. {SPARE}")
        cut = [{user: _rows(data, parts[user][i]) for user, data in train.items() if parts[user][i]} for i in (0, 1)]
        return cut[0], cut[1]

    def _cut(self, user: str, count: int) -> tuple[list[int], list[int]]:
        if self.dataset == "shakespeare":
            return _end(count, self.test_fraction)
        parts = hold_out(range(count), {"test": self.test_fraction}, numpy_generator(self.seed, "hold out", user))
        return parts["train"], parts.get("test", [])

    def _samples(self, train: Users, test: Users, words: Words) -> Callable[..., Dataset[Any]]:
        """What makes a dataset of the arrays of a user."""
        if self.dataset == "celeba":
            self._check_images(train, test)
            return partial(Faces, self.images)
        if self.dataset == "shakespeare":
            return _texts
        if is_whole(self.vocabulary):
            vocabulary = words.most_frequent((rows for rows, _ in train.values()), self.vocabulary)
        else:
            vocabulary = read_vocabulary(Path(str(self.vocabulary)))
        places = words.places(vocabulary, self.words)
        return lambda rows, labels: _texts(places[rows], labels)

    def _check_images(self, train: Users, test: Users) -> None:
        there = set(os.listdir(self.images)) if self.images.is_dir() else set()
        for user, (names, _) in (*train.items(), *test.items()):
            if missing := [str(name) for name in names if str(name) not in there]:
                raise DataError(
                    f"{self.images / missing[0]}: there is no such file, but user {user!r} has it. Put CelebA's"
                    " img_align_celeba there, or give its folder as images=."
                )


def _texts(rows: NDArray[Any], labels: NDArray[np.int64]) -> Dataset[tuple[Tensor, ...]]:
    """Rows that are kept as small as they are, and handed out as int64."""
    return TensorRows([torch.from_numpy(rows), torch.from_numpy(labels)], torch.arange(len(labels)), _as_longs)


@row_by_row
def _as_longs(batch: list[Tensor]) -> list[Tensor]:
    return [tensor.long() for tensor in batch]


def _rows(data: Arrays, rows: list[int]) -> Arrays:
    return data[0][rows], data[1][rows]


def _end(count: int, fraction: float) -> tuple[list[int], list[int]]:
    """The lines of a text to train on, and those at its end to hold out: none that share a character of x."""
    first = count - max(1, round(fraction * count))
    if first < 1 or first + GAP >= count:
        return list(range(count)), []
    return list(range(first)), list(range(first + GAP, count))
