"""Small sources of characters by writer, as files, and what a reader should make of them."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from lightning_fed.datamodules.femnist.characters import CLASSES, PIXELS, Block, Characters

#: writer -> images of shape (k, 784), paper 255, and labels
People = dict[str, tuple[NDArray[np.uint8], NDArray[np.uint8]]]

SHARED = Path(__file__).resolve().parents[2].parent / "shared" / "data"
needs_shared_data = pytest.mark.skipif(
    not SHARED.is_dir(), reason="compares with data that are not part of the project and not beside it (shared/data)"
)


def people(seed: int = 0, /, **counts: int) -> People:
    """Writers with so many characters each: white paper with random ink in the middle."""
    rng = np.random.default_rng(seed)
    return {name: characters(rng, count) for name, count in counts.items()}


def characters(rng: np.random.Generator, count: int) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    images = np.full((count, 28, 28), 255, dtype=np.uint8)
    images[:, 8:20, 8:20] = rng.integers(0, 256, size=(count, 12, 12))
    return images.reshape(count, PIXELS), rng.integers(0, CLASSES, size=count, dtype=np.uint8)


def blocks(everybody: People, test: bool | None = None) -> list[Block]:
    return [
        Block(name, images, labels, None if test is None else np.full(len(labels), test))
        for name, (images, labels) in everybody.items()
    ]


def shard(everybody: People) -> dict[str, Any]:
    """What a shard of LEAF says."""
    return {
        "users": list(everybody),
        "num_samples": [len(labels) for _, labels in everybody.values()],
        "user_data": {
            name: {"x": (images / 255).tolist(), "y": labels.tolist()} for name, (images, labels) in everybody.items()
        },
    }


def write_leaf(path: Path, everybody: People) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(shard(everybody)))
    return path


def write_split(folder: Path, train: People, test: People) -> Path:
    """A folder as LEAF leaves it behind."""
    write_leaf(folder / "train" / "all_data_0_niid_0_keep_0_train_9.json", train)
    write_leaf(folder / "test" / "all_data_0_niid_0_keep_0_test_9.json", test)
    return folder


def arrays(everybody: People) -> dict[str, Any]:
    """What an npz by writer holds: ink 255 on 0."""
    counts = [len(labels) for _, labels in everybody.values()]
    return {
        "images": 255 - np.concatenate([images for images, _ in everybody.values()]).reshape(-1, 28, 28),
        "labels": np.concatenate([labels for _, labels in everybody.values()]),
        "writer": np.repeat(np.arange(len(counts), dtype=np.int16), counts),
        "writer_names": np.array(list(everybody)),
    }


def write_npz(path: Path, contents: Mapping[str, Any]) -> Path:
    np.savez_compressed(path, **contents)
    return path


def people_of(source: Characters | Iterable[Block]) -> People:
    """Everybody in a cache, or in a stream of blocks."""
    if isinstance(source, Characters):
        rows = map(source.rows, range(len(source.writers)))
        return {name: (source.images[r], source.labels[r]) for name, r in zip(source.writers, rows, strict=True)}
    return {block.writer: (block.images, block.labels) for block in source}


def same(one: People, other: People) -> bool:
    """Whether they are the same writers in the same order, with the same characters in the same order."""
    return list(one) == list(other) and all(
        np.array_equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True)
    )


def caches() -> list[str]:
    """What lies in the cache folder of this test, hidden files included."""
    folder = Path("cache")
    return sorted(entry.name for entry in folder.iterdir()) if folder.exists() else []
