"""What a network learns from generated handwriting: FemnistCNN, trained centrally, on generated and on real characters.

Prints the accuracy on held-out characters of the training writers, on generated writers that it has not seen and, with
--unipen, on characters that people have written: over 62 classes, with the classes of MERGED taken as one, and what is
taken for what most often. Classes are drawn equally often in training, as letters are rarer than digits. UNIPEN's
writers with even and odd numbers are reported apart: the skeletons were adjusted while looking at the even ones alone.

Usage: python benchmarks/handwriting.py [--writers 300] [--epochs 4] [--unipen unipen62_by_writer.npz] [--sample 15000]
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from lightning_fed.datamodules.femnist.characters import ALPHABET, CLASSES, Block
from lightning_fed.datamodules.femnist.handwriting import write
from lightning_fed.models import FemnistCNN

Pair = tuple[Tensor, Tensor]

#: characters that only their size tells apart, or nothing
MERGED = ("0Oo", "1Iil", "Cc", "Jj", "Kk", "Mm", "Pp", "Ss", "Uu", "Vv", "Ww", "Xx", "Yy", "Zz2", "9gq")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--writers", type=int, default=300)
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--lr", type=float, default=1e-3, help="of Adam, going down to 0")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--unipen", type=Path, help="npz with images (ink 255 on 0), labels, writer")
    parser.add_argument("--sample", type=int, help="take this many characters of each half of UNIPEN")
    parser.add_argument("--half", choices=("even", "odd", "both"), default="both")
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(args.seed)
    began = time.monotonic()
    known = list(write(args.writers, args.seed))
    print(f"{sum(len(b.labels) for b in known)} characters written in {time.monotonic() - began:.1f} s", flush=True)
    train, held_out = hold_out(known)
    model = fit(FemnistCNN(), train, args.epochs, args.lr)
    print(f"trained in {time.monotonic() - began:.0f} s")
    report("held-out characters of the same writers", model, held_out)
    report("unseen generated writers", model, join(write(max(1, args.writers // 5), args.seed + 1)))
    if args.unipen is not None:
        for half in ("even", "odd") if args.half == "both" else (args.half,):
            report(f"UNIPEN, writers with {half} numbers", model, unipen(args.unipen, half, args.sample), confusions=15)


def join(blocks: Iterable[Block]) -> Pair:
    blocks = list(blocks)
    return tensors(np.concatenate([b.images for b in blocks]), np.concatenate([b.labels for b in blocks]))


def tensors(images: NDArray[np.uint8], labels: NDArray[np.uint8]) -> Pair:
    return torch.from_numpy(images).float() / 255, torch.from_numpy(labels).long()


def hold_out(blocks: list[Block]) -> tuple[Pair, Pair]:
    """Every tenth character of a writer is for testing."""
    x, y = join(blocks)
    tested = torch.cat([torch.arange(len(b.labels)) % 10 == 9 for b in blocks])
    return (x[~tested], y[~tested]), (x[tested], y[tested])


def unipen(path: Path, half: str, sample: int | None) -> Pair:
    with np.load(path, allow_pickle=False) as file:
        images, labels, writer = file["images"], file["labels"], file["writer"]
    rows = np.flatnonzero(writer % 2 == (half == "odd"))
    if sample is not None:
        rows = np.random.default_rng(0).permutation(rows)[:sample]
    return tensors(255 - images[rows].reshape(len(rows), -1), labels[rows])


def fit(model: nn.Module, train: Pair, epochs: int, lr: float, batch: int = 128) -> nn.Module:
    x, y = train
    weight = 1 / torch.bincount(y, minlength=CLASSES)[y].float()
    optimizer = torch.optim.Adam(model.parameters(), lr=lr)
    steps = epochs * (len(y) // batch)
    scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=lr, total_steps=max(steps, 2))
    for _ in range(epochs):
        for rows in torch.multinomial(weight, len(y), replacement=True).split(batch)[: len(y) // batch]:
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(x[rows]), y[rows]).backward()
            optimizer.step()
            scheduler.step()
    return model


@torch.no_grad()
def report(name: str, model: nn.Module, data: Pair, confusions: int = 0) -> None:
    x, y = data
    guess = torch.cat([model(part).argmax(dim=1) for part in x.split(1024)])
    group = merged()
    alike = (group[guess] == group[y]).float().mean()
    print(f"{name}: {len(y)} characters, accuracy {(guess == y).float().mean():.4f}, merged {alike:.4f}")
    table = torch.bincount(y * CLASSES + guess, minlength=CLASSES**2).view(CLASSES, CLASSES).fill_diagonal_(0)
    for count, place in zip(*(part.tolist() for part in table.flatten().topk(confusions)), strict=True):
        print(f"  {ALPHABET[place // CLASSES]} taken for {ALPHABET[place % CLASSES]}: {count}")


def merged() -> Tensor:
    """The class of each character when those of MERGED are one."""
    group = torch.arange(CLASSES)
    for characters in MERGED:
        group[[ALPHABET.index(c) for c in characters]] = ALPHABET.index(characters[0])
    return group


if __name__ == "__main__":
    main()
