"""Select writers and characters, and split them into training and test data, with LEAF's options."""

from __future__ import annotations

import math
from collections.abc import Sequence
from difflib import get_close_matches

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.randomness import numpy_generator
from lightning_fed.datamodules.femnist.characters import Characters, DataError

Rows = dict[str, NDArray[np.int64]]


def select(
    characters: Characters,
    *,
    writers: int | Sequence[str] | None = None,
    core: bool = False,
    fraction: float = 1.0,
    min_samples: int = 0,
    seed: int = 0,
) -> Rows:
    """Rows by writer, in the order of the source: LEAF's ``niid`` sampling and its removal of small writers.

    Args:
        writers: names, or a number to draw at random; all if None.
        core: take only writers that the source marks as core.
        fraction: of all characters: whole writers at random until it is reached, the last one cut short.
        min_samples: writers with fewer characters are left out.
    """
    rows = {name: np.asarray(characters.rows(i), dtype=np.int64) for i, name in enumerate(characters.writers)}
    if core:
        if characters.core is None:
            raise DataError(f"core=True, but {characters.source} does not mark core writers.")
        rows = {name: rows[name] for name in characters.core}
    if writers is not None and not isinstance(writers, int):
        rows = _named(rows, writers, characters.source)
    order = _shuffled(rows, numpy_generator(seed, "writers"))
    if fraction < 1:
        rows = _until(rows, order, fraction)
        if not rows:
            raise DataError(
                f"FEMNIST.selection.fraction is {fraction}, less than one character of {characters.source}. Raise it."
            )
    rows = {name: held for name, held in rows.items() if len(held) >= min_samples}
    if not rows:
        raise DataError(f"No writer of {characters.source} has {min_samples} characters. Lower min_samples.")
    if isinstance(writers, int):
        if writers > len(rows):
            raise DataError(
                f"FEMNIST.writers is {writers}, but only {len(rows)} writers of {characters.source} are left by core, "
                "fraction and min_samples."
            )
        chosen = set([name for name in order if name in rows][:writers])
        rows = {name: held for name, held in rows.items() if name in chosen}
    return rows


def split_by_sample(rows: Rows, train_fraction: float, seed: int) -> tuple[Rows, Rows]:
    """Every writer keeps ``max(1, floor(train_fraction * N))`` to train on; writers with one character are left out."""
    train: Rows = {}
    test: Rows = {}
    for name, held in rows.items():
        if len(held) < 2:
            continue
        count = 1 if len(held) == 2 else max(1, math.floor(train_fraction * len(held)))
        shuffled = numpy_generator(seed, "split", name).permutation(held)
        train[name], test[name] = np.sort(shuffled[:count]), np.sort(shuffled[count:])
    return train, {name: held for name, held in test.items() if len(held)}


def split_by_user(rows: Rows, train_fraction: float, seed: int) -> tuple[Rows, Rows]:
    """``max(1, floor(train_fraction * n))`` writers are for training, the others for testing."""
    order = _shuffled(rows, numpy_generator(seed, "split"))
    train = set(order[: max(1, math.floor(train_fraction * len(order)))])
    return (
        {name: held for name, held in rows.items() if name in train},
        {name: held for name, held in rows.items() if name not in train},
    )


def split_as_given(rows: Rows, test: NDArray[np.bool_]) -> tuple[Rows, Rows]:
    """The split that the source contains."""
    parts = tuple({name: held[test[held] == mark] for name, held in rows.items()} for mark in (False, True))
    train, tested = ({name: held for name, held in part.items() if len(held)} for part in parts)
    return train, tested


def _shuffled(rows: Rows, generator: np.random.Generator) -> list[str]:
    names = list(rows)  # by position: an array of names would lose zeros at their ends
    return [names[i] for i in generator.permutation(len(names))]


def _named(rows: Rows, writers: Sequence[str], source: str) -> Rows:
    for name in writers:
        if name not in rows:
            close = get_close_matches(str(name), list(rows), n=3) or list(rows)[:3]
            raise DataError(f"FEMNIST.writers names {name!r}, which {source} does not have. It has {', '.join(close)}.")
    return {name: held for name, held in rows.items() if name in set(writers)}


def _until(rows: Rows, order: Sequence[str], fraction: float) -> Rows:
    left = math.floor(fraction * sum(map(len, rows.values())))
    kept = {}
    for name in order:
        if left <= 0:
            break
        kept[name] = rows[name][:left]
        left -= len(kept[name])
    return {name: kept[name] for name in rows if name in kept}
