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


def write_folder(root: Path, images: int = 12, size: tuple[int, int] = (10, 8)) -> None:
    """A folder of PNG files for each of two classes."""
    rng = np.random.default_rng(0)
    for name in ("cat", "dog"):
        (root / name).mkdir(parents=True)
        for i in range(images):
            pixels = rng.integers(256, size=(*size, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(root / name / f"{i:03d}.png")
