"""Small image files in the formats of torchvision's data sets."""

from __future__ import annotations

import struct
from pathlib import Path

import numpy as np
from PIL import Image


def write_mnist(root: Path, train: int = 60, test: int = 20) -> None:
    """MNIST's four files, with random pixels; labels are 0 to 9 in turn."""
    folder = root / "MNIST" / "raw"
    folder.mkdir(parents=True)
    rng = np.random.default_rng(0)
    for name, n in (("train", train), ("t10k", test)):
        pixels = rng.integers(256, size=(n, 28, 28), dtype=np.uint8)
        (folder / f"{name}-images-idx3-ubyte").write_bytes(struct.pack(">4i", 2051, n, 28, 28) + pixels.tobytes())
        labels = (np.arange(n) % 10).astype(np.uint8)
        (folder / f"{name}-labels-idx1-ubyte").write_bytes(struct.pack(">2i", 2049, n) + labels.tobytes())


def write_pets(root: Path) -> None:
    """Oxford's pets: cats and dogs of three breeds in turn; the first is number 0 of the breeds and of the kinds."""
    breeds = (("Abyssinian", 1), ("beagle", 2), ("Bengal", 1))
    rng = np.random.default_rng(0)
    for folder in ("images", "annotations"):
        (root / "oxford-iiit-pet" / folder).mkdir(parents=True)
    for split, numbers in (("trainval", range(12)), ("test", range(12, 18))):
        lines = [f"{breeds[i % 3][0]}_{i} {i % 3 + 1} {breeds[i % 3][1]} 1\n" for i in numbers]
        (root / "oxford-iiit-pet" / "annotations" / f"{split}.txt").write_text("".join(lines))
        for i in numbers:
            pixels = rng.integers(256, size=(8, 8, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / "oxford-iiit-pet" / "images" / f"{breeds[i % 3][0]}_{i}.jpg")


def write_folder(root: Path, images: int = 12, size: tuple[int, int] = (10, 8)) -> None:
    """A folder of PNG files for each of two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(256, size=(*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:03d}.png")
