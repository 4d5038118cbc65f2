from __future__ import annotations

import logging
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Literal

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fed.core.cache import default_cache
from lightning_fed.core.memory import ClientId
from lightning_fed.core.validation import one_of, positive, whole
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.tensor_loader import TensorRows, row_by_row
from lightning_fed.datamodules.femnist import sources
from lightning_fed.datamodules.femnist.characters import ALPHABET, Characters, DataError
from lightning_fed.datamodules.femnist.selection import Rows, select, split_as_given, split_by_sample, split_by_user

log = logging.getLogger(__name__)

#: how many hands the generator has, unless the user wants another number
GENERATED_WRITERS = 100


class FEMNIST(FederatedDataModule):
    """62 handwritten characters by writer: 784 pixels in [0, 1], paper 1 and ink towards 0, as LEAF has them.

    Whatever the source, it is converted once into a cache that is mapped from disk: later starts are immediate, and
    memory does not grow with the data. Without a path, handwriting is generated, and says that it is.

    Args:
        path: a folder of LEAF JSON (with ``train/`` and ``test/``, or ``all_data``), an npz file by writer, parquet
            files of Hugging Face, NIST's ``by_class`` and ``by_write``; None generates.
        source: which of them, where it should not be found out from what lies there.
        download: fetch the data of ``source`` ("nist" or "parquet") into ``path`` first, unless they are there.
        writers: names of writers, or how many at random; None for all (100 if they are generated).
        core: only writers that the source marks as core: enough of digits, upper and lower case.
        fraction: of all characters: whole writers at random until it is reached.
        min_samples: writers with fewer characters are left out.
        split: "sample" tests on other characters of the same writers, "user" on other writers, "given" as the source
            has it; "auto" is "given" where there is one, else "sample".
        train_fraction: of a writer's characters, or of writers.
        invert: ink 1 on paper 0, as MNIST has it.
        seed: of the choice of writers, the split, and the generator.
        cache_dir: parent of the caches; by default ``$LIGHTNING_FED_CACHE``, or in the user's cache folder.
        dtype: of the pixels; labels are int64.

    Reference: arXiv:1812.01097.
    """

    class_names = tuple(ALPHABET)

    def __init__(
        self,
        path: str | Path | None = None,
        source: Literal["auto", "leaf", "npz", "parquet", "nist"] = "auto",
        download: bool = False,
        writers: int | list[str] | None = None,
        core: bool = False,
        fraction: float = 1.0,
        min_samples: int = 0,
        split: Literal["auto", "given", "sample", "user"] = "auto",
        train_fraction: float = 0.9,
        invert: bool = False,
        seed: int = 0,
        cache_dir: str | Path | None = None,
        batch_size: int = 10,
        eval_batch_size: int = 512,
        dtype: Literal["float32", "float64"] = "float32",
        drop_last: bool = False,
    ) -> None:
        super().__init__(batch_size=batch_size, eval_batch_size=eval_batch_size, drop_last=drop_last)
        path, cache_dir = (None if p is None else str(p) for p in (path, cache_dir))  # as checkpoints can hold them
        self.save_hyperparameters()
        self.path = None if path is None else Path(path)
        self.source, self.download, self.writers, self.core = source, download, writers, core
        self.fraction, self.min_samples, self.split, self.train_fraction = fraction, min_samples, split, train_fraction
        self.invert, self.seed, self.dtype = invert, seed, dtype
        self.cache_dir = default_cache() if cache_dir is None else Path(cache_dir)
        self._check()

    def prepare_data(self) -> None:
        """Download, convert or generate, if that was not done before."""
        if self.download:
            assert self.path is not None
            sources.DOWNLOADS[self.source](self.path)
        self._characters()

    def setup(self, stage: str | None = None) -> None:
        if self.has_split("train"):
            return
        characters = self._characters()
        train, test = self._split(characters)
        if not train:
            raise DataError(f"No writer of {characters.source} has characters to train on. Try split='sample'.")
        tensors = [torch.from_numpy(characters.images), torch.from_numpy(characters.labels)]
        transform = row_by_row(partial(_as_floats, dtype=getattr(torch, self.dtype), invert=self.invert))
        for name, rows in (("train", train), ("test", test)):
            datasets: dict[ClientId, Dataset[tuple[Tensor, ...]]] = {
                writer: TensorRows(tensors, torch.from_numpy(held), transform) for writer, held in rows.items()
            }
            if datasets:
                self.set_split(name, datasets, strangers=name == "test")
        count = sum(map(len, train.values())) + sum(map(len, test.values()))
        self.description = f"{characters.source} ({len({*train, *test})} writers, {count} characters)"
        if characters.generated:
            log.warning("The data are %s: results on them say nothing about FEMNIST.", self.description)

    def _characters(self) -> Characters:
        if self.path is not None:
            return sources.load(self.path, self.source, self.cache_dir)
        wanted = self.writers if isinstance(self.writers, int) else GENERATED_WRITERS
        return sources.generate(wanted, self.seed, self.cache_dir)

    def _split(self, characters: Characters) -> tuple[Rows, Rows]:
        rows = select(
            characters,
            writers=self.writers,
            core=self.core,
            fraction=self.fraction,
            min_samples=self.min_samples,
            seed=self.seed,
        )
        if self.split == "given" and characters.test is None:
            raise DataError(f"FEMNIST.split is 'given', but {characters.source} brings none. Try 'sample' or 'user'.")
        if self.split in ("auto", "given") and characters.test is not None:
            return split_as_given(rows, characters.test)
        by = split_by_user if self.split == "user" else split_by_sample
        return by(rows, self.train_fraction, self.seed)

    def _check(self) -> None:
        one_of(self, "source", ("auto", "leaf", "npz", "parquet", "nist"))
        one_of(self, "split", ("auto", "given", "sample", "user"))
        one_of(self, "dtype", ("float32", "float64"))
        positive(self, "fraction", "It is the share of all characters to take.", upper=1)
        positive(self, "train_fraction", "It is the share to train on; LEAF's own is 0.9.", upper=1)
        whole(self, "min_samples", 0)
        whole(self, "seed")
        if isinstance(self.writers, int) or self.writers is None:
            whole(self, "writers", 1, optional=True)
        elif not isinstance(self.writers, Sequence) or isinstance(self.writers, str) or not self.writers:
            raise ValueError(f"FEMNIST.writers must be a number or a list of names, got {self.writers!r}.")
        if self.path is None and (self.source != "auto" or self.core):
            raise ValueError(
                f"FEMNIST got source={self.source!r} and core={self.core}, but no path. Give the path of the data; "
                "without one, handwriting is generated."
            )
        if self.download and (self.path is None or self.source not in sources.DOWNLOADS):
            raise ValueError(
                f"FEMNIST.download wants source to be one of {', '.join(sources.DOWNLOADS)} and a path to put it; got "
                f"source={self.source!r}, path={self.path!r}."
            )


def _as_floats(batch: list[Tensor], dtype: torch.dtype, invert: bool) -> list[Tensor]:
    images, labels = batch
    pixels = images.to(dtype) / 255
    return [1 - pixels if invert else pixels, labels.long()]
