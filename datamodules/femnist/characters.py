"""Handwritten characters by writer: one compact form for every source, memory-mapped from a cache on disk.

A source is an iterator of :class:`Block`; :func:`build` writes it into a folder once, :meth:`Characters.open` compares
its checksums and maps it, so that memory does not grow with the number of characters.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from tempfile import mkdtemp
from typing import Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.cache import digest_of

SIDE = 28
PIXELS = SIDE * SIDE
ALPHABET = "0123456789ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz"
CLASSES = len(ALPHABET)
FORMAT = 2

#: Number of rows that are copied at a time when samples are sorted by writer.
CHUNK = 4096

Bytes = NDArray[np.uint8]


class DataError(ValueError):
    """Data are missing or wrong; the message names the file, the writer and the problem."""


@dataclass(frozen=True)
class Block:
    """Some characters of one writer.

    Args:
        writer: name of the writer; a writer may come in several blocks.
        images: shape (k, 784), row by row, as in LEAF: paper is 255, ink goes towards 0.
        labels: shape (k,), positions in :data:`ALPHABET`.
        test: which of them belong to the test data, if the source says so.
    """

    writer: str
    images: Bytes
    labels: Bytes
    test: NDArray[np.bool_] | None = None


@dataclass(frozen=True)
class Characters:
    """All characters of a source, grouped by writer; ``images`` and the rest are maps of files, not memory."""

    source: str
    generated: bool
    writers: list[str]
    ends: NDArray[np.int64] = field(repr=False)
    images: Bytes = field(repr=False)
    labels: Bytes = field(repr=False)
    test: NDArray[np.bool_] | None = field(repr=False)
    core: list[str] | None = field(repr=False)

    def rows(self, writer: int) -> range:
        """The rows of a writer's characters."""
        return range(int(self.ends[writer - 1]) if writer else 0, int(self.ends[writer]))

    @classmethod
    def open(cls, folder: Path, fingerprint: str) -> Characters:
        """Map a folder that :func:`build` has written from the source with this fingerprint."""
        meta = _read_meta(folder)
        if meta["fingerprint"] != fingerprint:
            raise DataError(
                f"{folder}: this cache was made from another source ({meta['source']}). Delete the folder, or give "
                "another cache_dir."
            )
        ends = np.cumsum(meta["counts"], dtype=np.int64)
        n = int(ends[-1])
        opened = cls(
            source=meta["source"],
            generated=meta["generated"],
            writers=meta["writers"],
            ends=ends,
            images=_map(folder / "images.u8", (n, PIXELS)),
            labels=_map(folder / "labels.u8", (n,)),
            test=_map(folder / "test.u8", (n,)).astype(bool) if meta["split"] else None,
            core=meta["core"],
        )
        for name, digest in meta["digests"].items():
            if digest_of(folder / name) != digest:
                raise DataError(
                    f"{folder / name}: this cache is damaged: its checksum does not match. Delete the folder to"
                    " build it again."
                )
        return opened


def build(
    folder: Path,
    blocks: Iterable[Block],
    *,
    source: str,
    fingerprint: str,
    generated: bool = False,
    core: list[str] | None = None,
) -> Characters:
    """Write the blocks of a source into ``folder`` in one atomic step, and open it."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(mkdtemp(prefix=f".{folder.name[:16]}-", dir=folder.parent))
    try:
        meta = {"format": FORMAT, "source": source, "fingerprint": fingerprint, "generated": generated, "core": core}
        meta |= _write(scratch, blocks, source)
        meta["digests"] = {path.name: digest_of(path) for path in sorted(scratch.glob("*.u8"))}
        meta["digest"] = _digest(meta)
        (scratch / "meta.json").write_text(json.dumps(meta))
        with suppress(OSError):  # another process may have written the same folder first
            os.replace(scratch, folder)
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    return Characters.open(folder, fingerprint)


def _write(folder: Path, blocks: Iterable[Block], source: str) -> dict[str, Any]:
    writers: dict[str, int] = {}
    owners: list[tuple[int, int]] = []
    split: bool | None = None
    with _files(folder) as files:
        for block in blocks:
            check(block, source)
            if split is not None and split != (block.test is not None):
                raise DataError(f"{source}: some writers have a test split, but {block.writer!r} differs.")
            split = block.test is not None
            owners.append((writers.setdefault(block.writer, len(writers)), len(block.labels)))
            files.append(block)
    if not writers:
        raise DataError(f"{source}: there are no characters in it.")
    owner = np.repeat(*np.asarray(owners, dtype=np.int64).T)
    if np.any(np.diff(owner) < 0):
        _group(folder, np.argsort(owner, kind="stable"))
    return {"writers": list(writers), "counts": np.bincount(owner).tolist(), "split": bool(split)}


class _files:  # noqa: N801 - a context manager
    """The three files of a cache, open for appending."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def __enter__(self) -> _files:
        self.images, self.labels, self.test = (self._open(name) for name in ("images", "labels", "test"))
        return self

    def _open(self, name: str) -> BinaryIO:
        return (self.folder / f"{name}.u8").open("wb")

    def append(self, block: Block) -> None:
        self.images.write(np.ascontiguousarray(block.images).data)
        self.labels.write(np.ascontiguousarray(block.labels).data)
        if block.test is not None:
            self.test.write(block.test.astype(np.uint8).data)

    def __exit__(self, *_: object) -> None:
        for file in (self.images, self.labels, self.test):
            file.close()


def check(block: Block, source: str) -> None:
    """Refuse an invalid block, which is a bug of a reader."""
    where = f"{source}, writer {block.writer!r}"
    k = len(block.labels)
    if block.labels.ndim != 1:
        raise DataError(f"{where}: labels must have one dimension, got shape {block.labels.shape}.")
    if not k:
        raise DataError(f"{where}: has no characters.")
    if block.images.shape != (k, PIXELS):
        raise DataError(f"{where}: {k} labels came with images of shape {block.images.shape}, not ({k}, {PIXELS}).")
    if block.images.dtype != np.uint8 or block.labels.dtype != np.uint8:
        raise DataError(f"{where}: images and labels must be uint8, got {block.images.dtype}, {block.labels.dtype}.")
    if block.labels.max() >= CLASSES:
        raise DataError(f"{where}: label {block.labels.max()} is not one of 0 to {CLASSES - 1}.")
    if block.test is not None and block.test.shape != (k,):
        raise DataError(f"{where}: {k} labels came with test marks of shape {block.test.shape}.")


def _group(folder: Path, order: NDArray[np.int64]) -> None:
    """Bring the rows of each file into ``order``, a few at a time."""
    for name, width in (("images", PIXELS), ("labels", 1), ("test", 1)):
        path = folder / f"{name}.u8"
        if not path.stat().st_size:
            continue
        rows = _map(path, (len(order), width))
        grouped = path.with_suffix(".grouped")
        with grouped.open("wb") as file:
            for i in range(0, len(order), CHUNK):
                file.write(rows[order[i : i + CHUNK]].data)
        os.replace(grouped, path)


def _read_meta(folder: Path) -> dict[str, Any]:
    path = folder / "meta.json"
    try:
        meta: dict[str, Any] = json.loads(path.read_text())
        if meta["format"] != FORMAT:
            raise DataError(f"{path}: this cache has format {meta['format']}, wanted {FORMAT}. Delete the folder.")
        _check_meta(meta)
    except (OSError, ValueError, KeyError, TypeError) as error:
        if isinstance(error, DataError):
            raise
        raise DataError(f"{path}: this cache is damaged ({error}). Delete the folder to build it again.") from error
    return meta


def _digest(meta: dict[str, Any]) -> str:
    """Checksum of a cache's metadata, without the checksum itself."""
    text = json.dumps({key: value for key, value in meta.items() if key != "digest"}, sort_keys=True)
    return sha256(text.encode()).hexdigest()


def _check_meta(meta: dict[str, Any]) -> None:
    known = {"source", "fingerprint", "generated", "core", "writers", "counts", "split", "digests", "digest"}
    if missing := known - set(meta):
        raise ValueError(f"{min(missing)} is missing")
    if meta["digest"] != _digest(meta):
        raise ValueError("it is not what was written")
    writers, counts, core = meta["writers"], meta["counts"], meta["core"]
    whole = len(writers) == len(set(writers)) == len(counts) > 0 and set(core or ()) <= set(writers)
    if not whole or not all(isinstance(count, int) and count > 0 for count in counts):
        raise ValueError("writers, counts and core do not belong together")


def _map(path: Path, shape: tuple[int, ...]) -> Bytes:
    size = path.stat().st_size if path.exists() else 0
    if size != np.prod(shape):
        raise DataError(
            f"{path}: this cache is damaged: {size} bytes instead of {np.prod(shape)}. Delete the folder to build "
            "it again."
        )
    # copy on write: PyTorch wants writable memory, and nothing must reach the file
    return np.memmap(path, dtype=np.uint8, mode="c", shape=shape)
