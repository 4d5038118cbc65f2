"""Generate handwriting in the format of FEMNIST, by writers that differ.

A character is one of the skeletons in ``glyphs.txt``, with the writer's deformation, a small random deformation of its
own, and the writer's pen.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import positive, whole
from lightning_fed.datamodules.femnist.characters import ALPHABET, CLASSES, PIXELS, SIDE, Block, Bytes
from lightning_fed.datamodules.femnist.glyphs import glyphs

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Rng = np.random.Generator

#: Relative frequency of each character, about as in NIST's forms: half of them are digits.
RATES = (
    *[40] * 10,
    *(7, 4, 11, 5, 5, 10, 3, 3, 13, 4, 3, 6, 10),  # A to M
    *(9, 28, 9, 3, 6, 23, 11, 14, 5, 5, 3, 5, 3),
    *(11, 6, 3, 11, 28, 3, 4, 10, 3, 2, 3, 17, 3),  # a to m
    *(13, 3, 3, 3, 16, 3, 21, 3, 3, 3, 3, 3, 3),
)
DIGITS, CAPITALS, SMALL = slice(0, 10), slice(10, 36), slice(36, 62)
DOTTED = [ALPHABET.index(character) for character in "ij"]

#: longest side that a skeleton may have, with its pen, in pixels
ROOM = 25.0
#: pieces of a stroke are about this long, in pixels; a piece and the pen around it fit into WINDOW
PIECE, WINDOW, MARGIN = 1.8, 9, 5


@dataclass(frozen=True)
class Handwriting:
    """Checked arguments of :func:`write`."""

    writers: int
    seed: int
    mean_characters: float

    def __post_init__(self) -> None:
        whole(self, "writers", 1)
        whole(self, "seed", 0)
        positive(self, "mean_characters", "It is the mean number of characters per writer; FEMNIST has about 230.")


def write(writers: int = 100, seed: int = 0, mean_characters: float = 230) -> Iterator[Block]:
    """Characters of ``writers`` writers, one block each.

    Writer ``w`` is a function of ``seed`` and ``w`` (and of ``mean_characters``), whatever the number of
    writers. Writers differ in the number of their characters (most between 50 and 500), in which characters they write,
    and in their hand.

    Args:
        writers: number of writers.
        seed: seeds all draws.
        mean_characters: mean number of characters of a writer.

    >>> [(block.writer, block.images.shape[1]) for block in write(writers=2)]
    [('g0000', 784), ('g0001', 784)]
    """
    asked = Handwriting(writers, seed, mean_characters)
    return (_writer(asked, w) for w in range(writers))


def _writer(asked: Handwriting, w: int) -> Block:
    rng = numpy_generator(asked.seed, "handwriting", w)
    labels = _labels(rng, asked.mean_characters)
    hand = Hand.draw(rng)
    return Block(f"g{w:04d}", _draw(rng, hand, labels), labels.astype(np.uint8))


def _labels(rng: Rng, mean: float) -> Ints:
    """Draw a writer's labels: numbers are skewed, and every writer favours other characters."""
    spread = 0.5
    count = mean * rng.lognormal(-(spread**2) / 2, spread)
    rates = np.array(RATES, dtype=float)
    for kind in (DIGITS, CAPITALS, SMALL):
        rates[kind] *= rng.gamma(4.0)
    rates *= rng.gamma(2.0, size=CLASSES)
    size = max(1, round(float(np.clip(count, 0.2 * mean, 2.3 * mean))))
    return rng.choice(CLASSES, size=size, p=rates / rates.sum())


@dataclass(frozen=True)
class Shapes:
    """How a writer forms characters. Lengths are hundredths of a capital's height.

    Args:
        favourite: usual allograph of every character, a row of the glyphs; shape (62,).
        faithful: probability that the writer takes it.
        bend: displacement of the points of every allograph, shape (g, k, 2).
        corner: which points are corners, shape (g, k); a fluent writer rounds some corners of the skeletons.
    """

    favourite: Ints
    faithful: float
    bend: Floats
    corner: NDArray[np.bool_]


@dataclass(frozen=True)
class Proportions:
    """How large characters are.

    Args:
        aspect: width over height, relative to the skeletons, shape (62,).
        size: relative to the skeletons, shape (62,).
        height: of a capital, in pixels.
        digit: height of digits, relative to capitals.
        body, ascent, descent: heights of small letters, relative to the skeletons.
    """

    aspect: Floats
    size: Floats
    height: float
    digit: float
    body: float
    ascent: float
    descent: float


@dataclass(frozen=True)
class Motion:
    """How the writer moves the pen.

    Args:
        slant: tangent of the angle to the vertical.
        turn: angle of the baseline.
        roundness: of curves; 1 is a circle.
        linked: probability that the pen is not lifted between strokes.
        unsteady: standard deviation of the displacements that are new in every character.
    """

    slant: float
    turn: float
    roundness: float
    linked: float
    unsteady: float


@dataclass(frozen=True)
class Pen:
    """What the pen draws.

    Args:
        width: in pixels.
        dark: darkness of the ink, up to 1.
        soft: width of the edge of the ink, in pixels.
    """

    width: float
    dark: float
    soft: float


@dataclass(frozen=True)
class Hand:
    """What all characters of a writer have in common."""

    shapes: Shapes
    proportions: Proportions
    motion: Motion
    pen: Pen

    @classmethod
    def draw(cls, rng: Rng) -> Hand:
        points = glyphs().points
        bend = rng.normal(0, 2.5, points.shape) + _waves(rng, len(points), 5.0)(points)
        bend += _shifts(rng, glyphs().stroke, 4.0)
        height = rng.uniform(12, 18.5)
        return cls(  # the order of the draws decides the data
            Shapes(
                favourite=_pick(rng, np.arange(CLASSES)),
                faithful=rng.uniform(0.8, 1.0),
                bend=bend,
                corner=glyphs().corner & (rng.random(points.shape[:2]) > rng.beta(0.5, 4.0)),
            ),
            Proportions(
                aspect=rng.lognormal(0.08, 0.18) * rng.lognormal(0, 0.12, CLASSES),
                size=rng.lognormal(0, 0.1, CLASSES),
                height=height,
                digit=min(1.25, rng.lognormal(-0.05, 0.16)),
                body=rng.lognormal(0.05, 0.15),
                ascent=rng.lognormal(0, 0.2),
                descent=rng.lognormal(0.12, 0.22),
            ),
            Motion(
                slant=rng.normal(0.1, 0.2),
                turn=rng.normal(0, 0.05),
                roundness=rng.uniform(0.7, 1.25),
                linked=rng.beta(0.4, 5.0),
                unsteady=rng.lognormal(0.3, 0.35),
            ),
            Pen(
                width=float(np.clip(rng.lognormal(0.88, 0.16) * (height / 15) ** 0.3, 1.6, 3.4)),
                dark=1 - abs(rng.normal(0, 0.08)),
                soft=rng.uniform(0.8, 1.6),
            ),
        )


def _pick(rng: Rng, labels: Ints) -> Ints:
    """An allograph for every label: the least of exponential waiting times comes first in proportion to its weight."""
    g = glyphs()
    waiting = rng.exponential(size=(len(labels), len(g.weight))) / g.weight
    chosen: Ints = np.where(g.character == labels[:, None], waiting, np.inf).argmin(axis=1)
    return chosen


class _waves:  # noqa: N801 - a function with parameters
    """Smooth random displacements, one field per row: two waves, a little longer than a character."""

    def __init__(self, rng: Rng, rows: int, size: float | Floats) -> None:
        self.vector = rng.normal(0, 0.03, (rows, 2, 2))
        self.phase = rng.uniform(0, 2 * np.pi, (rows, 2))
        self.size = np.reshape(size, (-1, 1, 1)) * rng.normal(size=(rows, 2, 2))

    def __call__(self, points: Floats) -> Floats:
        """Displacements of points of shape (rows, k, 2)."""
        return np.sin(points @ self.vector + self.phase[:, None]) @ self.size

    def of(self, row: Ints, points: Floats) -> Floats:
        """Displacements of points of shape (m, 2), each in the field of its row."""
        angle = np.einsum("mi,mij->mj", points, self.vector[row]) + self.phase[row]
        moved: Floats = np.einsum("mi,mij->mj", np.sin(angle), self.size[row])
        return moved


class Curves(NamedTuple):
    """Pieces of strokes, in pixels: which character they belong to, where they start and end."""

    row: Ints
    start: Floats
    end: Floats


def _draw(rng: Rng, hand: Hand, labels: Ints) -> Bytes:
    g, shapes, motion = glyphs(), hand.shapes, hand.motion
    chosen = np.where(rng.random(len(labels)) < shapes.faithful, shapes.favourite[labels], _pick(rng, labels))
    points = g.points[chosen] + shapes.bend[chosen]
    points = points + rng.normal(0, motion.unsteady, (len(labels), *g.points.shape[1:]))
    points += _shifts(rng, g.stroke[chosen], 1.2 * motion.unsteady)
    points = _stretched(hand.proportions, labels, _overshoot(rng, points, g.drawn[chosen], 0.05 * motion.unsteady))
    linked = g.lifted[chosen] & (rng.random((len(labels), 1)) < motion.linked) & ~np.isin(labels, DOTTED)[:, None]
    corner = shapes.corner[chosen]
    corner[:, :-1] |= linked
    corner[:, 1:] |= linked
    curves = _curves(points, g.drawn[chosen] | linked, corner, hand)
    curves = _place(rng, hand, curves, len(labels))
    return _ink(hand.pen, curves, len(labels))


def _shifts(rng: Rng, stroke: Ints, size: float) -> Floats:
    """Displacements of whole strokes, for every point; the first stroke stays."""
    shifts = rng.normal(0, size, (len(stroke), stroke.max() + 1, 2))
    shifts[:, 0] = 0
    return shifts[np.arange(len(stroke))[:, None], stroke]


def _overshoot(rng: Rng, points: Floats, drawn: NDArray[np.bool_], size: float) -> Floats:
    """Let strokes start and end too early or too late, by a share of their first and last step."""
    step = np.diff(points, axis=1)
    off = np.zeros((len(drawn), 1), dtype=bool)
    starts, ends = drawn & ~np.hstack([off, drawn[:, :-1]]), drawn & ~np.hstack([drawn[:, 1:], off])
    early, late = rng.normal(0, size, (2, *drawn.shape))
    points = points.copy()
    points[:, :-1] -= np.where(starts, early, 0)[..., None] * step
    points[:, 1:] += np.where(ends, late, 0)[..., None] * step
    return points


def _stretched(by: Proportions, labels: Ints, points: Floats) -> Floats:
    """Stretch the skeletons: digits as a whole, small letters by their three heights."""
    x, y = points[..., 0], points[..., 1]
    body = np.clip(y, 0, 50) * by.body + np.maximum(y - 50, 0) * by.ascent + np.minimum(y, 0) * by.descent
    small, digit = (labels >= SMALL.start)[:, None], (labels < DIGITS.stop)[:, None]
    size = np.where(small, by.body, np.where(digit, by.digit, 1.0))
    stretched = np.stack([x * size * by.aspect[labels, None], np.where(small, body, y * size)], axis=-1)
    return stretched * by.size[labels, None, None]


def _curves(points: Floats, drawn: NDArray[np.bool_], corner: NDArray[np.bool_], hand: Hand) -> Curves:
    """Cut smooth curves through the points (Hermite's cubics, circular through three points) into short pieces."""
    step = np.diff(points, axis=1)
    length = np.linalg.norm(step, axis=2, keepdims=True) + 1e-6
    unit = step / length
    smooth = np.zeros((*corner.shape, 1), dtype=bool)
    smooth[:, 1:-1, 0] = drawn[:, :-1] & drawn[:, 1:] & ~corner[:, 1:-1]
    tangent = np.zeros_like(points)
    tangent[:, 1:-1] = unit[:, :-1] * length[:, 1:] + unit[:, 1:] * length[:, :-1]
    tangent /= np.linalg.norm(tangent, axis=2, keepdims=True) + 1e-6
    before, after = tangent[:, :-1], tangent[:, 1:]
    leave = np.where(smooth[:, :-1], before, np.where(smooth[:, 1:], _mirror(after, unit), unit))
    arrive = np.where(smooth[:, 1:], after, np.where(smooth[:, :-1], _mirror(before, unit), unit))

    row, j = drawn.nonzero()
    count = np.ceil(length[row, j, 0] * hand.proportions.height / 100 * 1.2 / PIECE).astype(int)
    part = np.arange(count.sum()) - np.repeat(np.cumsum(count) - count, count)
    row, j, count = np.repeat(row, count), np.repeat(j, count), np.repeat(count, count)
    reach = hand.motion.roundness * length[row, j]
    ends = points[row, j], points[row, j + 1], reach * leave[row, j], reach * arrive[row, j]
    return Curves(row, _hermite(part / count, *ends), _hermite((part + 1) / count, *ends))


def _mirror(tangent: Floats, unit: Floats) -> Floats:
    """The tangent at the free end of a curve: half way between a circle's, from its other end, and the chord."""
    along: Floats = (tangent * unit).sum(axis=2, keepdims=True)
    return (along + 0.5) * unit - tangent / 2


def _hermite(t: Floats, p: Floats, q: Floats, u: Floats, v: Floats) -> Floats:
    t = t[:, None]
    bump = t * t * (3 - 2 * t)
    return p + bump * (q - p) + t * (1 - t) ** 2 * u - t * t * (1 - t) * v


def _place(rng: Rng, hand: Hand, curves: Curves, rows: int) -> Curves:
    """Bend, slant, turn and scale; then centre the box around every character."""
    row, motion = curves.row, hand.motion
    waves = _waves(rng, rows, 1.5 * motion.unsteady)
    slant = motion.slant + 0.04 * motion.unsteady * rng.normal(size=rows)
    angle = motion.turn + 0.03 * motion.unsteady * rng.normal(size=rows)
    scale = hand.proportions.height / 100 * np.exp(0.06 * rng.normal(size=(2, rows)))
    sheared = np.array([[np.ones(rows), slant], [np.zeros(rows), np.ones(rows)]])
    turned = np.array([[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]])
    matrix = np.einsum("ijr,jkr,kr->rki", turned, sheared, scale)
    ends = [np.einsum("mi,mij->mj", p + waves.of(row, p), matrix[row]) for p in curves[1:]]

    first = np.searchsorted(row, np.arange(rows))
    low = np.minimum.reduceat(np.minimum(*ends), first)
    high = np.maximum.reduceat(np.maximum(*ends), first)
    shrink = np.minimum(1.0, (ROOM - hand.pen.width) / (high - low).max(axis=1))[:, None]
    middle = (low + high) / 2
    start, end = ((p - middle[row]) * shrink[row] * (1, -1) + (SIDE - 1) / 2 for p in ends)
    return Curves(row, start, end)


def _ink(pen: Pen, curves: Curves, rows: int) -> Bytes:
    """Every pixel is as dark as the nearest piece makes it; pieces are drawn in a window around each of them."""
    row, a, b = curves.row, curves.start.astype(np.float32), curves.end.astype(np.float32)
    corner = np.round((a + b) / 2).astype(np.int64) - WINDOW // 2
    offset = np.arange(WINDOW, dtype=np.float32)
    x, y = ((corner[:, i, None] - a[:, i, None]).astype(np.float32) + offset for i in (0, 1))
    step = b - a
    along = step / np.maximum((step**2).sum(axis=1, keepdims=True), 1e-6)
    t = x[:, None, :] * along[:, 0, None, None] + y[:, :, None] * along[:, 1, None, None]
    np.clip(t, 0, 1, out=t)
    dx = x[:, None, :] - t * step[:, 0, None, None]
    dy = y[:, :, None] - t * step[:, 1, None, None]
    distance = np.sqrt(dx * dx + dy * dy)
    ink = np.clip((pen.width / 2 - distance) / pen.soft + 0.5, 0, 1)

    side = SIDE + 2 * MARGIN
    canvas = np.zeros((rows, side, side), dtype=np.float32)
    origin = (row * side + corner[:, 1] + MARGIN) * side + corner[:, 0] + MARGIN
    window = np.arange(WINDOW)[:, None] * side + np.arange(WINDOW)
    np.maximum.at(canvas.reshape(-1), (origin[:, None, None] + window).reshape(-1), ink.reshape(-1))
    inside = canvas[:, MARGIN:-MARGIN, MARGIN:-MARGIN].reshape(rows, PIXELS)
    return (255 - np.round(255 * pen.dark * inside)).astype(np.uint8)
