"""Generated handwriting: writers with a hand of their own, the same for the same seed."""

from itertools import islice

import numpy as np
import pytest

from lightning_fed.core.randomness import numpy_generator
from lightning_fed.datamodules.femnist.characters import ALPHABET, CLASSES, SIDE, check
from lightning_fed.datamodules.femnist.glyphs import glyphs
from lightning_fed.datamodules.femnist.handwriting import write


@pytest.fixture(scope="module")
def blocks():
    return list(write(40, seed=3))


def same(a, b):
    return a.writer == b.writer and np.array_equal(a.images, b.images) and np.array_equal(a.labels, b.labels)


def drawings(character):
    """The allographs of a character: their strokes, each an array of points."""
    g = glyphs()
    for row in np.flatnonzero(g.character == ALPHABET.index(character)):
        points = g.points[row][: 1 + np.flatnonzero(g.drawn[row])[-1] + 1]
        yield np.split(points, np.flatnonzero(g.lifted[row]) + 1)


def box(strokes):
    points = np.concatenate(strokes)
    return points.min(axis=0), points.max(axis=0)


def test_the_same_seed_gives_the_same_characters(blocks):
    again = list(islice(write(40, seed=3), 8))
    assert all(same(a, b) for a, b in zip(blocks[:8], again, strict=True))


def test_another_seed_gives_other_characters(blocks):
    assert not any(same(a, b) for a, b in zip(blocks[:3], write(3, seed=4), strict=True))


def test_a_writer_is_the_same_whoever_else_writes(blocks):
    assert all(same(a, b) for a, b in zip(blocks[:5], write(5, seed=3), strict=True))


def test_drawing_characters_leaves_the_global_generators_alone():
    before = np.random.get_state()[1].copy()
    next(write(1))
    assert np.array_equal(before, np.random.get_state()[1])


def test_blocks_keep_the_contract_of_a_source(blocks):
    assert [block.writer for block in blocks] == [f"g{w:04d}" for w in range(40)]
    for block in blocks:
        check(block, "handwriting")
        assert block.test is None


def test_all_characters_occur_and_about_half_are_digits(blocks):
    counts = np.bincount(np.concatenate([block.labels for block in blocks]), minlength=CLASSES)
    assert counts.min() > 0
    assert 0.4 < counts[:10].sum() / counts.sum() < 0.6


def test_sizes_are_uneven_and_have_the_mean_that_was_asked_for(blocks):
    sizes = np.array([len(block.labels) for block in blocks])
    assert 190 < sizes.mean() < 270
    assert 40 < sizes.min() < 120 < 350 < sizes.max() < 600
    few = [len(block.labels) for block in write(40, mean_characters=20)]
    assert 14 < np.mean(few) < 26
    assert min(few) >= 1


def test_writers_favour_different_characters(blocks):
    digits = np.array([(block.labels < 10).mean() for block in blocks])
    assert digits.std() > 0.08
    # more spread than draws of this number from one distribution would have
    chance = np.mean([0.25 / len(block.labels) for block in blocks]) ** 0.5
    assert digits.std() > 2 * chance


def test_every_image_has_paper_ink_and_a_free_border(blocks):
    images = np.concatenate([block.images for block in blocks]).reshape(-1, SIDE, SIDE)
    assert images.max(axis=(1, 2)).min() == 255
    assert images.min(axis=(1, 2)).max() < 128
    border = np.concatenate(
        [images[:, [0, -1]].reshape(len(images), -1), images[:, :, [0, -1]].reshape(len(images), -1)], 1
    )
    assert border.min() == 255


def test_characters_are_centred(blocks):
    ink = np.concatenate([block.images for block in blocks]).reshape(-1, SIDE, SIDE) < 255
    for axis in (1, 2):
        along = ink.any(axis=axis)
        first, last = along.argmax(axis=1), SIDE - 1 - along[:, ::-1].argmax(axis=1)
        assert np.abs(first + last - (SIDE - 1)).max() <= 2


def test_characters_keep_their_relative_size(blocks):
    ink = np.concatenate([block.images for block in blocks]).reshape(-1, SIDE, SIDE) < 128
    height = ink.any(axis=2).sum(axis=1)
    labels = np.concatenate([block.labels for block in blocks])
    for small, capital in ("cC", "oO", "sS", "vV", "xX"):
        means = [height[labels == ALPHABET.index(character)].mean() for character in (small, capital)]
        assert means[0] < 0.8 * means[1]


def test_a_writer_is_more_like_himself_than_like_others(blocks):
    rng = numpy_generator(0, "test")
    own, other = [], []
    for label in range(10):
        of = [block.images[block.labels == label].astype(float) for block in blocks]
        of = [images for images in of if len(images) > 1]
        for w, images in enumerate(of):
            a, b = rng.choice(len(images), 2, replace=False)
            stranger = of[(w + 1) % len(of)]
            own.append(np.linalg.norm(images[a] - images[b]))
            other.append(np.linalg.norm(images[a] - stranger[0]))
    assert 1.15 * np.mean(own) < np.mean(other)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"writers": 0}, r"writers must be a whole number >= 1, got 0"),
        ({"writers": 2.0}, r"writers must be a whole number >= 1, got 2.0"),
        ({"seed": -1}, r"seed must be a whole number >= 0, got -1"),
        ({"seed": "a"}, r"seed must be a whole number >= 0, got 'a'"),
        ({"mean_characters": 0}, r"mean_characters must be positive.* got 0"),
        ({"mean_characters": float("nan")}, r"mean_characters must be positive.* got nan"),
        ({"mean_characters": "many"}, r"mean_characters must be positive.* got 'many'"),
    ],
)
def test_wrong_arguments_are_refused_at_once(arguments, message):
    with pytest.raises(ValueError, match=message):
        write(**arguments)


def test_every_character_has_skeletons_in_the_order_of_the_alphabet():
    g = glyphs()
    assert sorted(set(g.character)) == list(range(CLASSES))
    assert (np.diff(g.character) >= 0).all()
    assert (g.weight > 0).all()
    assert np.abs(g.points).max() < 130


@pytest.mark.parametrize("character", ALPHABET)
def test_skeletons_stand_where_their_character_stands(character):
    for strokes in drawings(character):
        (left, bottom), (right, top) = box(strokes)
        assert 0 <= right - left <= 95
        if character in "gjpqy":
            assert bottom < -30
            assert top < 90
        if character in "acemnorsuvwx":
            assert -5 <= bottom <= 5
            assert 45 <= top <= 55
        if character in "bdhkl" or character in ALPHABET[:36]:
            assert bottom < 10
            assert top > 90


@pytest.mark.parametrize(
    ("character", "strokes"), [("C", 1), ("L", 1), ("S", 1), ("8", 1), ("3", 1), ("m", 1), ("o", 1)]
)
def test_some_characters_are_always_one_stroke(character, strokes):
    assert all(len(drawing) == strokes for drawing in drawings(character))


@pytest.mark.parametrize("character", "HXKTQ")
def test_some_characters_have_a_way_with_several_strokes(character):
    assert any(len(drawing) > 1 for drawing in drawings(character))


@pytest.mark.parametrize(
    ("character", "end", "side"),
    [
        ("b", "top", "left"),
        ("d", "top", "right"),
        ("p", "bottom", "left"),
        ("q", "bottom", "right"),
        ("k", "top", "left"),
    ],
)
def test_the_usual_stem_is_on_its_side(character, end, side):
    points = np.concatenate(next(drawings(character)))
    tip = points[points[:, 1].argmax() if end == "top" else points[:, 1].argmin()]
    assert (tip[0] < points[:, 0].mean()) == (side == "left")


@pytest.mark.parametrize(("low", "high"), ["69", "LP", "uT", "vY", "UF"])
def test_some_characters_are_heavy_below_and_others_above(low, high):
    heights = [np.mean([np.concatenate(d)[:, 1].mean() for d in drawings(character)]) for character in (low, high)]
    assert heights[0] < 50 < heights[1]


@pytest.mark.parametrize("character", "0O8o")
def test_rings_are_closed(character):
    for strokes in drawings(character):
        ring = strokes[0]
        gap = np.linalg.norm(ring[None] - ring[:, None], axis=2)
        apart = np.abs(np.subtract.outer(np.arange(len(ring)), np.arange(len(ring)))) > 3
        assert gap[apart].min() < 15


def test_the_usual_i_and_j_have_their_dots():
    for character in "ij":
        body, dot = next(drawings(character))
        assert dot[:, 1].min() > body[:, 1].max() + 15
