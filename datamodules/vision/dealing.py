"""Decide which client trains, validates and tests on which images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch.utils.data import ConcatDataset

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import is_number
from lightning_fed.data.huggingface import SERVER
from lightning_fed.data.partition import Partition, check_dealt, deal_samples, hold_out

#: The share of each client's images that is tested on, if a data set has no test images.
TEST_SHARE = 0.1

#: Positions of images by client.
Hand = dict[ClientId, Sequence[int]]


@dataclass(frozen=True)
class Dealing:
    """How the splits of a data set become those of clients.

    Args:
        partition: deals training images to clients.
        test: "server", "clients", or the share that each client holds out; None decides.
        val_fraction: the share that each client holds out.
        splits: names of the splits that the data set has.
        seed: of what is held out.
    """

    partition: Partition
    test: str | float | None
    val_fraction: float
    splits: Sequence[str]
    seed: int

    def __post_init__(self) -> None:
        if isinstance(self.test, bool) or not (
            self.test in (None, "server", "clients") or (is_number(self.test) and 0 <= self.test < 1)
        ):
            raise ValueError(
                "Vision.test must be 'server', 'clients' or a share of each client's images in [0, 1), got"
                f" {self.test!r}."
            )
        if isinstance(self.test, str) and "test" not in self.splits:
            raise ValueError(
                f"Vision.test is {self.test!r}, but the data set has no test images of its own. Give the share that"
                " each client tests on, such as test=0.1."
            )
        if sum(self.fractions.values()) >= 1:
            raise ValueError(f"test and val_fraction leave no images to train on, got {self.fractions}.")

    @property
    def fractions(self) -> dict[str, float]:
        """The shares that each client holds out of its training images."""
        if self.test is None:
            test = 0.0 if "test" in self.splits else TEST_SHARE
        else:
            test = 0.0 if isinstance(self.test, str) else float(self.test)
        return {split: share for split, share in (("test", test), ("val", self.val_fraction)) if share}

    def deal(self, parts: Mapping[str, Any]) -> dict[str, tuple[str, Hand]]:
        """By split of ours: the part of the data set in which its images are, and whose they are."""
        dealt = {"train": ("train", self._train(parts["train"]))} if self.test != "clients" else self._together(parts)
        if not is_number(self.test):
            dealt.update({s: (s, {SERVER: range(len(parts[s]))}) for s in parts if s not in dealt})
        elif "val" in parts:
            dealt["val"] = "val", {SERVER: range(len(parts["val"]))}
        held: dict[str, Hand] = {split: {} for split in ("train", *self.fractions)}
        for cid, rows in dealt["train"][1].items():
            own = hold_out(rows, self.fractions, numpy_generator(self.seed, "hold out", cid))
            for split, kept in own.items():
                held[split][cid] = kept
        for split, hand in held.items():
            if not hand:
                raise ValueError(f"No client has an image to spare for {split}, of which a share is to be held out.")
            dealt[split] = "train", hand
        return dealt

    def _train(self, dataset: Any) -> Hand:
        return {**deal_samples(self.partition, dataset, self.seed)}

    def _together(self, parts: Mapping[str, Any]) -> dict[str, tuple[str, Hand]]:
        """Deal train and test images as one data set, so that those of a client have one distribution."""
        first = len(parts["train"])
        train, test = dict[ClientId, Sequence[int]](), dict[ClientId, Sequence[int]]()
        for cid, rows in self._train(ConcatDataset([parts["train"], parts["test"]])).items():
            train[cid] = [row for row in rows if row < first]
            if own := [row - first for row in rows if row >= first]:
                test[cid] = own
        check_dealt(train, first)
        return {"train": ("train", train), "test": ("test", test)}
