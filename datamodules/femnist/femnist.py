from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from lightning_fed.core.cache import default_cache
from lightning_fed.core.memory import ClientId
from lightning_fed.core.validation import whole
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.data.tensor_loader import TensorRows, row_by_row
from lightning_fed.datamodules.femnist import sources
from lightning_fed.datamodules.femnist.characters import ALPHABET, Characters, DataError
from lightning_fed.datamodules.femnist.options import (
    By,
    Kind,
    Pixels,
    Selection,
    Source,
    Split,
    as_options,
    check_moved,
)
from lightning_fed.datamodules.femnist.selection import Rows, select, split_as_given, split_by_sample, split_by_user

log = logging.getLogger(__name__)

#: Default number of generated writers.
GENERATED_WRITERS = 100


class FEMNIST(FederatedDataModule):
    """62 handwritten characters by writer: 784 pixels in [0, 1], paper 1 and ink towards 0, as in LEAF.

    Every source is converted once into a cache that is mapped from disk: later starts are immediate, and memory does
    not grow with the data. Without a path, handwriting is generated, and the log says so.

    Args:
        path: a folder of LEAF JSON (with ``train/`` and ``test/``, or ``all_data``), an npz file by writer, parquet
            files of Hugging Face, or NIST's ``by_class`` and ``by_write``; None generates handwriting.
        source: kind of the files, or a :class:`Source` with ``kind``, ``download`` and ``cache_dir``.
        writers: names of writers, or how many to draw of those that ``selection`` leaves; None takes all of them (100
            if they are generated).
        selection: a :class:`Selection` with ``core``, ``fraction`` and ``min_samples``.
        split: "auto", "given", "sample" or "user", or a :class:`Split` with ``by`` and ``train_fraction``.
        pixels: a :class:`Pixels` with ``invert`` and ``dtype``.
        seed: of the choice of writers, the split, and the generator.
        loading: arguments of :class:`~lightning_fed.FederatedDataModule`, such as ``batch_size`` (10 by default),
            ``eval_batch_size`` (512), ``drop_last``, ``sampler``, ``val_fraction`` (a share of the characters that a
            writer has to train on, by default none) and ``loader_options``.

    Each of the four groups may be given as a mapping:

    >>> data = FEMNIST("data/femnist", writers=30, selection={"min_samples": 100}, split={"train_fraction": 0.8})
    >>> data.selection
    Selection(core=False, fraction=1.0, min_samples=100)

    Reference: arXiv:1812.01097.
    """

    class_names = tuple(ALPHABET)

    def __init__(
        self,
        path: str | Path | None = None,
        source: Kind | Source = "auto",
        writers: int | list[str] | None = None,
        selection: Selection = Selection(),  # noqa: B008 - frozen
        split: By | Split = "auto",
        pixels: Pixels = Pixels(),  # noqa: B008 - frozen
        seed: int = 0,
        **loading: Any,
    ) -> None:
        check_moved(loading)
        super().__init__(
            None,
            loading.pop("val_fraction", 0.0),
            None,
            batch_size=loading.pop("batch_size", 10),
            eval_batch_size=loading.pop("eval_batch_size", 512),
            **loading,
        )
        self.path = None if path is None else Path(path)
        self.source = as_options(Source, source, "source", shorthand="kind")
        self.selection = as_options(Selection, selection, "selection")
        self.split = as_options(Split, split, "split", shorthand="by")
        self.pixels = as_options(Pixels, pixels, "pixels")
        self.writers, self.seed = writers, seed
        self.cache_dir = default_cache() if self.source.cache_dir is None else Path(self.source.cache_dir)
        self._check()
        # plain values, as checkpoints can hold them; functions are left out
        path = None if path is None else str(path)
        groups = (self.source, self.selection, self.split, self.pixels)
        source, selection, split, pixels = (asdict(group) for group in groups)  # type: ignore[assignment]
        sizes = {"batch_size": self.batch_size, "eval_batch_size": self.eval_batch_size}
        loading.update(sizes, val_fraction=self.val_fraction)
        self.save_hyperparameters(ignore=["sampler", "loader_options"])

    def prepare_data(self) -> None:
        """Download, convert or generate the data, unless the cache has them."""
        if self.source.download:
            assert self.path is not None
            sources.DOWNLOADS[self.source.kind](self.path)
        self._characters()

    def setup(self, stage: str | None = None) -> None:
        if self.has_split("train"):
            return
        characters = self._characters()
        train, test = self._split(characters)
        if not train:
            raise DataError(f"No writer of {characters.source} has characters to train on. Try split='sample'.")
        tensors = [torch.from_numpy(characters.images), torch.from_numpy(characters.labels)]
        transform = row_by_row(partial(_as_floats, dtype=getattr(torch, self.pixels.dtype), invert=self.pixels.invert))
        for name, rows in (("train", train), ("test", test)):
            datasets: dict[ClientId, Dataset[tuple[Tensor, ...]]] = {
                writer: TensorRows(tensors, torch.from_numpy(held), transform) for writer, held in rows.items()
            }
            if datasets:
                self.set_split(name, datasets, strangers=name == "test")
        count = sum(map(len, train.values())) + sum(map(len, test.values()))
        self.description = f"{characters.source} ({len({*train, *test})} writers, {count} characters)"
        if characters.generated:
            log.warning("The data are %s: results on them do not apply to FEMNIST.", self.description)

    def _characters(self) -> Characters:
        if self.path is not None:
            return sources.load(self.path, self.source.kind, self.cache_dir)
        wanted = self.writers if isinstance(self.writers, int) else GENERATED_WRITERS
        return sources.generate(wanted, self.seed, self.cache_dir)

    def _split(self, characters: Characters) -> tuple[Rows, Rows]:
        rows = select(characters, writers=self.writers, seed=self.seed, **asdict(self.selection))
        if self.split.by == "given" and characters.test is None:
            raise DataError(f"FEMNIST.split is 'given', but {characters.source} has none. Use 'sample' or 'user'.")
        if self.split.by in ("auto", "given") and characters.test is not None:
            return split_as_given(rows, characters.test)
        split = split_by_user if self.split.by == "user" else split_by_sample
        return split(rows, self.split.train_fraction, self.seed)

    def _check(self) -> None:
        whole(self, "seed")
        if isinstance(self.writers, int) or self.writers is None:
            whole(self, "writers", 1, optional=True)
        elif not isinstance(self.writers, Sequence) or isinstance(self.writers, str) or not self.writers:
            raise ValueError(f"FEMNIST.writers must be a number or a list of names, got {self.writers!r}.")
        kind, core = self.source.kind, self.selection.core
        if self.path is None and (kind != "auto" or core):
            raise ValueError(
                f"FEMNIST got source kind {kind!r} and selection core={core}, but no path. Give the path of the data; "
                "without one, handwriting is generated."
            )
        if self.source.download and (self.path is None or kind not in sources.DOWNLOADS):
            raise ValueError(
                f"FEMNIST.source.download needs a kind out of {', '.join(sources.DOWNLOADS)} and a path to download to;"
                f" got kind={kind!r}, path={self.path!r}."
            )


def _as_floats(batch: list[Tensor], dtype: torch.dtype, invert: bool) -> list[Tensor]:
    images, labels = batch
    pixels = images.to(dtype) / 255
    return [1 - pixels if invert else pixels, labels.long()]
