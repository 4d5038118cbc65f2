"""FEMNIST as Parquet files in the layout of Hugging Face's ``flwrlabs/femnist``.

Columns: ``image`` (a struct whose ``bytes`` are a PNG or JPEG file), ``writer_id``, and ``character``, a position in
0-9A-Za-z or the character itself. Needs the extra ``huggingface``.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from lightning_fed.datamodules.femnist.characters import ALPHABET, CLASSES, Block, Bytes, DataError
from lightning_fed.datamodules.femnist.nist import pixels

COLUMNS = ("image", "writer_id", "character")
EXTRA = 'Install it with: pip install "lightning-fed[huggingface]"'

#: rows in memory at a time
ROWS = 4096


def read(path: Path) -> Iterator[Block]:
    """Yield the characters of a Parquet file, or of all in a folder, batch by batch.

    Where a folder has ``train-*.parquet`` and ``test-*.parquet``, those of the latter are marked as test data.
    """
    files = _files(path)
    if not files:
        raise DataError(f"{path}: wanted a .parquet file, or a folder with some, and found none.")
    if path.is_dir() and (missing := _missing(files)):
        raise DataError(f"{path}: {missing[0]} is missing, while other parts are there. Download the folder anew.")
    split = _has_split(files, path)
    for file in files:
        for rows in _batches(file):
            yield from _blocks(rows, file, file.name.startswith("test") if split else None)


def download(folder: Path, name: str = "flwrlabs/femnist") -> None:
    """Fetch the Parquet files of a dataset from Hugging Face into ``folder``, unless they are there."""
    if (files := _files(folder)) and not _missing(files):
        return
    by_hand = f"Check the network and the name, or put the dataset's .parquet files into {folder} by hand."
    try:
        from huggingface_hub import snapshot_download
    except ImportError as error:
        raise DataError(f"To download {name!r}, the package huggingface_hub is needed. {EXTRA}") from error
    try:
        snapshot_download(name, repo_type="dataset", allow_patterns="*.parquet", local_dir=str(folder))
    except Exception as error:  # its errors come from requests or httpx, according to its version
        raise DataError(f"The dataset {name!r} could not be downloaded ({error}). {by_hand}") from error
    files = _files(folder)  # without network, an older snapshot may come back as if it were whole
    if not files or _missing(files):
        raise DataError(f"The dataset {name!r} came without {(_missing(files) or ['.parquet files'])[0]}. {by_hand}")


def _files(path: Path) -> list[Path]:
    """The Parquet file at ``path``, or those of the folder and its visible subfolders."""
    if path.is_file():
        return [path]
    return sorted(file for file in path.rglob("*.parquet") if not file.relative_to(path).as_posix().startswith("."))


def _missing(files: list[Path]) -> list[str]:
    """Which parts of ``<name>-00000-of-00002.parquet`` and the like are not there, though others are."""
    names, wanted = {file.name for file in files}, set()
    for name in names:
        if numbered := re.fullmatch(r"(.*-)(\d+)-of-(\d+)(.*)", name):
            head, number, total, tail = numbered.groups()
            wanted |= {f"{head}{i:0{len(number)}d}-of-{total}{tail}" for i in range(int(total))}
    return sorted(wanted - names)


def _has_split(files: list[Path], path: Path) -> bool:
    kinds = {file.name: file.name.split("-")[0] for file in files}
    if not {"train", "test"} <= set(kinds.values()):
        return False
    if others := [name for name, kind in kinds.items() if kind not in ("train", "test")]:
        raise DataError(f"{path}: is {others[0]} for training or for testing? Name it train-* or test-*, or remove it.")
    return True


def _batches(file: Path) -> Iterator[list[dict[str, Any]]]:
    try:
        from pyarrow import ArrowException
        from pyarrow.parquet import ParquetFile
    except ImportError as error:
        raise DataError(f"{file}: to read Parquet files, the package pyarrow is needed. {EXTRA}") from error
    try:
        with ParquetFile(file) as table:
            _check(table.schema_arrow, file)
            for batch in table.iter_batches(ROWS, columns=list(COLUMNS)):
                yield batch.to_pylist()
    except (ArrowException, OSError) as error:
        raise DataError(f"{file}: is not a whole Parquet file ({error}). Delete it and get it anew.") from error


def _check(schema: Any, file: Path) -> None:
    """Refuse columns that we would misread."""
    if missing := [column for column in COLUMNS if column not in schema.names]:
        raise DataError(f"{file}: wanted the columns {', '.join(COLUMNS)}, {missing[0]} is not in {schema.names}.")
    info = json.loads((schema.metadata or {}).get(b"huggingface", b"{}"))
    names = info.get("info", {}).get("features", {}).get("character", {}).get("names")
    if names is not None and names != list(ALPHABET):
        raise DataError(f"{file}: the classes of 'character' must be {ALPHABET} in this order, got {names}.")


def _blocks(rows: list[dict[str, Any]], file: Path, test: bool | None) -> Iterator[Block]:
    writers = defaultdict(list)
    for row in rows:
        writers[row["writer_id"]].append(row)
    for writer, own in writers.items():
        where = f"{file}, writer {writer!r}"
        if writer is None:
            raise DataError(f"{file}: a row has no writer_id. Every character must belong to a writer.")
        images = np.stack([_image(row["image"], where) for row in own])
        labels = np.array([_label(row["character"], where) for row in own], dtype=np.uint8)
        yield Block(str(writer), images, labels, None if test is None else np.full(len(own), test))


def _image(cell: Any, where: str) -> Bytes:
    data = cell.get("bytes") if isinstance(cell, dict) else None
    if not isinstance(data, bytes):
        raise DataError(
            f"{where}: column 'image' must hold the bytes of image files, {{bytes, path}}, got {cell!r:.80}."
        )
    return pixels(data, where)


def _label(character: Any, where: str) -> int:
    if isinstance(character, str) and len(character) == 1 and character in ALPHABET:
        return ALPHABET.index(character)
    if isinstance(character, int) and 0 <= character < CLASSES:
        return character
    raise DataError(f"{where}: 'character' must be 0 to {CLASSES - 1} or one of {ALPHABET}, got {character!r}.")
