"""NIST Special Database 19, converted the way LEAF does it.

``by_write`` says who wrote an image but not what it shows; ``by_class`` says what it shows but not who wrote it. The
same image is the same file in both, so the MD5 of the files brings the two together.

As in LEAF (data/femnist/preprocess): of ``by_class/<hex code>/`` the subfolders that have "hsf" and not "mit" in their
names; a writer is the name of a folder, ``by_write/hsf_*/<writer>/<type>/<image>.png``; images become grey, then 28x28
by ``thumbnail`` with Lanczos. Pillow before 7.0 skipped a first, coarse step of ``thumbnail`` and gave slightly other
pixels (a few of 255); LEAF does not say which Pillow it means.

Unlike LEAF:

- the first image of a writer counts once; LEAF's group_by_writer.py takes it twice for every writer but the first;
- files are taken in the order of their names, where LEAF leaves the order to the file system; so of two classes that
  share a file the first by name wins;
- an image of ``by_write`` that ``by_class`` lacks is left out with a warning, where LEAF stops;
- a class folder that is no character is refused, where LEAF passes over names that are not two letters long;
- only ``.png`` files are looked at, and folders of one name in two ``hsf_*`` are one writer.
"""

from __future__ import annotations

import io
import os
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from hashlib import md5
from http.client import HTTPException
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from lightning_fed.datamodules.femnist.characters import ALPHABET, PIXELS, SIDE, Block, Bytes, DataError

URL = "https://s3.amazonaws.com/nist-srd/SD19"
#: the names of the folders in by_class, hexadecimal codes of the characters
CODES = {f"{ord(character):x}": label for label, character in enumerate(ALPHABET)}

#: reads a file of an archive by its name
Read = Callable[[str], bytes]


def read(path: Path) -> Iterator[Block]:
    """Yield every writer of SD 19 from a folder that holds ``by_class`` and ``by_write``.

    Each is a zip file, which is read as it is, or the folder extracted from it; the zip file is preferred.
    """
    labels = _labels(path)
    found, lost = 0, []
    with _open(path, "by_write") as (names, load):
        for (_, writer), group in groupby(_split(names, 4), key=lambda parts: parts[:2]):
            images, classes = [], []
            for parts in group:
                name = "/".join(parts)
                data = load(name)
                label = labels.get(_digest(data))
                if label is None:
                    lost.append(name)
                    continue
                images.append(pixels(data, f"{path / 'by_write' / name}, writer {writer!r}"))
                classes.append(label)
            if images:
                found += len(images)
                yield Block(writer, np.stack(images), np.array(classes, dtype=np.uint8))
    _report(path, found, lost, len(labels))


def pixels(data: bytes, where: str) -> Bytes:
    """Decode an image file into 784 grey values, paper 255; ``where`` names it in errors."""
    try:
        with Image.open(io.BytesIO(data)) as image:
            grey = image.convert("L")
    except Exception as error:  # damaged files make Pillow raise nearly anything: OSError, SyntaxError, struct.error
        raise DataError(f"{where}: cannot be decoded as an image ({error}). Get the file anew.") from error
    size = grey.size
    grey.thumbnail((SIDE, SIDE), Image.Resampling.LANCZOS)
    if grey.size != (SIDE, SIDE):
        raise DataError(f"{where}: wanted a square image of at least {SIDE}x{SIDE} pixels, got {size[0]}x{size[1]}.")
    return np.asarray(grey, dtype=np.uint8).reshape(PIXELS)


def download(folder: Path, url: str = URL) -> None:
    """Fetch by_class.zip and by_write.zip into ``folder``, unless they are there; each comes whole or not at all."""
    folder.mkdir(parents=True, exist_ok=True)
    for name in ("by_class", "by_write"):
        target = folder / f"{name}.zip"
        if not target.exists() and not (folder / name).is_dir():
            _fetch(f"{url}/{name}.zip", target)


def _fetch(url: str, target: Path) -> None:
    scratch = target.with_name(f".{target.name}.{os.getpid()}")
    by_hand = f"Check the network and try again, or fetch it by hand and put it at {target}."
    try:
        torch.hub.download_url_to_file(url, str(scratch), progress=True)
        if not zipfile.is_zipfile(scratch):  # its directory is at the end, so a broken connection shows here
            raise DataError(f"{url}: {scratch.stat().st_size} bytes came that are no whole zip file. {by_hand}")
        os.replace(scratch, target)
    except (OSError, HTTPException) as error:
        raise DataError(f"{url}: could not be downloaded ({error}). {by_hand}") from error
    finally:
        scratch.unlink(missing_ok=True)


def _labels(path: Path) -> dict[bytes, int]:
    """What each file of ``by_class`` shows, by its digest."""
    labels: dict[bytes, int] = {}
    with _open(path, "by_class") as (names, load):
        for code, part, file in _split(names, 3):
            if "hsf" in part and "mit" not in part:
                label = _label(code, path / "by_class" / code)
                labels.setdefault(_digest(load(f"{code}/{part}/{file}")), label)
    return labels


def _report(path: Path, found: int, lost: list[str], classified: int) -> None:
    if not found:
        raise DataError(
            f"{path}: none of the {len(lost)} images of by_write is among the {classified} of by_class. Both must come "
            "unchanged from the same edition of NIST SD 19, since they are matched by the MD5 of their files."
        )
    if lost:
        warnings.warn(
            f"{path}: {len(lost)} images of by_write are not in by_class and were left out, the first is {lost[0]}. "
            "Is by_class complete?",
            stacklevel=3,
        )


def _label(code: str, where: Path) -> int:
    if code.lower() not in CODES:
        raise DataError(f"{where}: is no class of NIST SD 19. Wanted the code of a digit or letter, 30 to 7a.")
    return CODES[code.lower()]


def _digest(data: bytes) -> bytes:
    return md5(data, usedforsecurity=False).digest()


def _split(names: list[str], depth: int) -> Iterator[list[str]]:
    return (parts for parts in (name.split("/") for name in names) if len(parts) == depth)


@contextmanager
def _open(path: Path, name: str) -> Iterator[tuple[list[str], Read]]:
    """The sorted names of an archive's images, without ``name/`` in front, and what reads them."""
    file, folder = path / f"{name}.zip", path / name
    if file.is_file():
        with _open_zip(file, f"{name}/") as opened:
            yield opened
    elif folder.is_dir():
        found = (Path(at, leaf).relative_to(folder).as_posix() for at, _, leaves in os.walk(folder) for leaf in leaves)
        yield sorted(leaf for leaf in found if leaf.endswith(".png")), lambda leaf: (folder / leaf).read_bytes()
    else:
        raise DataError(
            f"{path}: there is neither {file.name} nor a folder {name}/. Get {URL}/{file.name} and put it there."
        )


@contextmanager
def _open_zip(file: Path, top: str) -> Iterator[tuple[list[str], Read]]:
    try:
        archive = zipfile.ZipFile(file)
    except (zipfile.BadZipFile, OSError) as error:
        raise DataError(f"{file}: is not a whole zip file ({error}). Delete it and download it anew.") from error

    def load(name: str) -> bytes:
        try:
            return archive.read(top + name)
        except (zipfile.BadZipFile, zlib.error, EOFError, OSError, RuntimeError) as error:
            raise DataError(
                f"{file}: {top + name} is damaged ({error}). Delete the zip and download it anew."
            ) from error

    with archive:
        names = archive.namelist()
        for name in names:
            if name.startswith(("/", "\\")) or ".." in name.replace("\\", "/").split("/") or name[1:2] == ":":
                raise DataError(f"{file}: member {name!r} escapes its folder. Do not use this archive.")
        yield sorted(name.removeprefix(top) for name in names if name.startswith(top) and name.endswith(".png")), load
