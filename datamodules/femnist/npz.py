"""Characters by writer in one npz file: ``images`` (ink 255 on 0), ``labels``, ``writer``, ``writer_names``.

Optional are ``is_test``, one mark per character, and ``writer_core``, one mark per writer with enough of everything.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.datamodules.femnist.characters import CLASSES, PIXELS, Block, DataError


def read(path: Path) -> Iterator[Block]:
    """One block per writer, in LEAF's polarity."""
    arrays = _load(path)
    images, labels, owner = arrays["images"].reshape(-1, PIXELS), arrays["labels"], arrays["writer"]
    order = np.argsort(owner, kind="stable")
    ends = np.searchsorted(owner[order], np.arange(len(arrays["writer_names"])), side="right")
    for name, rows in zip(arrays["writer_names"].tolist(), np.split(order, ends[:-1]), strict=True):
        if not len(rows):
            raise DataError(f"{path}, writer {name!r}: has no characters.")
        test = arrays["is_test"][rows].astype(bool) if "is_test" in arrays else None
        yield Block(name, 255 - images[rows], labels[rows].astype(np.uint8), test)


def core_writers(path: Path) -> list[str] | None:
    """Writers that the file marks as core; None if it marks none."""
    arrays = _load(path, small=True)
    return arrays["writer_names"][arrays["writer_core"].astype(bool)].tolist() if "writer_core" in arrays else None


def _load(path: Path, small: bool = False) -> dict[str, NDArray[Any]]:
    wanted = ["writer_names"] if small else ["images", "labels", "writer", "writer_names"]
    optional = ["writer_core"] if small else ["is_test", "writer_core"]
    try:
        # opened here: numpy leaves the file of a damaged archive open
        with path.open("rb") as opened, np.load(opened, allow_pickle=False) as file:
            missing = [name for name in wanted if name not in file]
            if missing:
                raise DataError(f"{path}: has no array {missing[0]!r}; it has {', '.join(file.files) or 'none'}.")
            arrays = {name: np.asanyarray(file[name]) for name in [*wanted, *optional] if name in file}
    except DataError:
        raise
    except Exception as error:  # there is hardly one that a damaged archive does not raise
        raise DataError(f"{path}: cannot be read as npz ({error}).") from error
    _check_writers(path, arrays)
    if not small:
        _check_characters(path, arrays)
    return arrays


def _check_writers(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    names = arrays["writer_names"]
    if names.ndim != 1 or names.dtype.kind != "U" or not 0 < len(names) == len(set(names.tolist())):
        raise DataError(f"{path}: writer_names must be different strings, got {names.dtype} of shape {names.shape}.")
    _check_marks(path, arrays, "writer_core", len(names))


def _check_characters(path: Path, arrays: dict[str, NDArray[Any]]) -> None:
    images, labels, owner, names = (arrays[name] for name in ("images", "labels", "writer", "writer_names"))
    for name in ("labels", "writer"):
        dtype, shape = arrays[name].dtype, arrays[name].shape
        if len(shape) != 1 or not np.issubdtype(dtype, np.integer):
            raise DataError(f"{path}: {name} must be a row of whole numbers, got {dtype} of shape {shape}.")
    n = len(labels)
    if images.dtype != np.uint8 or images.shape not in ((n, 28, 28), (n, PIXELS)):
        raise DataError(
            f"{path}: images must be uint8 of shape ({n}, 28, 28), one for each of {n} labels; got {images.dtype} of "
            f"shape {images.shape}."
        )
    if owner.shape != (n,):
        raise DataError(f"{path}: writer must name one writer for each of {n} characters, got shape {owner.shape}.")
    _in_range(path, "writer", owner, len(names), lambda i: f"character {i}")
    _in_range(path, "labels", labels, CLASSES, lambda i: f"writer {str(names[owner[i]])!r}")
    _check_marks(path, arrays, "is_test", n)


def _check_marks(path: Path, arrays: dict[str, NDArray[Any]], name: str, length: int) -> None:
    marks = arrays.get(name)
    if marks is not None and (marks.shape != (length,) or marks.dtype.kind not in "biu"):
        raise DataError(f"{path}: {name} must be {length} truths, got {marks.dtype} of shape {marks.shape}.")


def _in_range(path: Path, name: str, values: NDArray[Any], end: int, who: Any) -> None:
    wrong = np.flatnonzero((values < 0) | (values >= end))
    if len(wrong):
        raise DataError(f"{path}, {who(wrong[0])}: {name} must lie in 0 to {end - 1}, got {values[wrong[0]]}.")
