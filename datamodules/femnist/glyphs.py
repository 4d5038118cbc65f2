"""Skeletons of the 62 characters, read from ``glyphs.txt``, which explains its notation."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from lightning_fed.datamodules.femnist.characters import ALPHABET

Point = tuple[float, float, bool]
Stroke = list[Point]

LINES = Path(__file__).with_name("glyphs.txt")


@dataclass(frozen=True)
class Glyphs:
    """All allographs as arrays, one row each, padded to the longest.

    Args:
        character: shape (g,), positions in the alphabet.
        weight: shape (g,), how common an allograph is beside the others of its character.
        points: shape (g, k, 2).
        drawn: shape (g, k - 1): a line goes from point j to point j + 1.
        lifted: shape (g, k - 1): the pen moves from point j to point j + 1 in the air.
        corner: shape (g, k).
        stroke: shape (g, k), the number of the stroke that a point belongs to.
    """

    character: NDArray[np.int64]
    weight: NDArray[np.float64]
    points: NDArray[np.float64]
    drawn: NDArray[np.bool_]
    lifted: NDArray[np.bool_]
    corner: NDArray[np.bool_]
    stroke: NDArray[np.int64]


def parse(line: str) -> tuple[str, float, list[Stroke]]:
    """Take a line of :data:`LINES` apart.

    >>> parse("T 6 32,98 32,0! / 0,98 64,98")
    ('T', 6.0, [[(32.0, 98.0, False), (32.0, 0.0, True)], [(0.0, 98.0, False), (64.0, 98.0, False)]])
    """
    character, weight, strokes = line.split(maxsplit=2)
    return character, float(weight), [[_point(word) for word in stroke.split()] for stroke in strokes.split("/")]


def _point(word: str) -> Point:
    x, y = word.rstrip("!").split(",")
    return float(x), float(y), word.endswith("!")


@cache
def glyphs() -> Glyphs:
    """The allographs of :data:`LINES`."""
    parsed = [parse(line) for line in LINES.read_text().splitlines() if line and not line.startswith("#")]
    k = max(sum(map(len, strokes)) for _, _, strokes in parsed)
    points = np.zeros((len(parsed), k, 3))
    drawn, lifted = np.zeros((2, len(parsed), k - 1), dtype=bool)
    for row, (_, _, strokes) in enumerate(parsed):
        flat = [point for stroke in strokes for point in stroke]
        ends = np.cumsum([len(stroke) for stroke in strokes])
        points[row, : len(flat)] = flat
        points[row, len(flat) :] = flat[-1]
        drawn[row, : len(flat) - 1] = True
        lifted[row, ends[:-1] - 1] = True
    return Glyphs(
        character=np.array([ALPHABET.index(character) for character, _, _ in parsed]),
        weight=np.array([weight for _, weight, _ in parsed]),
        points=points[:, :, :2],
        drawn=drawn & ~lifted,
        lifted=lifted,
        corner=points[:, :, 2] > 0,
        stroke=np.pad(lifted.cumsum(axis=1), ((0, 0), (1, 0))),
    )
