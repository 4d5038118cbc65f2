"""Sources of characters: detect the kind of source at a path, convert it once, and open the cache afterwards."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path

from tqdm.auto import tqdm

from lightning_fed.datamodules.femnist import handwriting, leaf, nist, npz, parquet
from lightning_fed.datamodules.femnist.characters import FORMAT, Block, Characters, DataError, build

log = logging.getLogger(__name__)

READERS: dict[str, Callable[[Path], Iterator[Block]]] = {
    "leaf": leaf.read,
    "npz": npz.read,
    "parquet": parquet.read,
    "nist": nist.read,
}
NAMES = {
    "leaf": "FEMNIST (LEAF JSON)",
    "npz": "characters by writer (npz)",
    "parquet": "FEMNIST (parquet)",
    "nist": "FEMNIST (NIST SD-19)",
}
DOWNLOADS: dict[str, Callable[[Path], None]] = {"nist": nist.download, "parquet": parquet.download}
LAYOUTS = "a folder of LEAF JSON, an .npz file, .parquet files, or NIST's by_class and by_write"

#: Number of bytes at each end of a file that enter its fingerprint.
PROBE = 1 << 16

#: A bar on a terminal alone: in a file its steps would stand on one line, with the next message at its end.
_BAR = {"leave": False, "disable": None}


def load(path: Path, kind: str, cache: Path) -> Characters:
    """The characters at ``path``, converted at the first call."""
    kind = detect(path) if kind == "auto" else kind
    mark = fingerprint(path, kind)
    folder = cache / mark
    if (folder / "meta.json").exists():
        return Characters.open(folder, mark)
    log.info("Converting %s into %s; this happens once.", path, folder)
    core = npz.core_writers(path) if kind == "npz" else None
    with tqdm(READERS[kind](path), desc=f"Reading {path.name}", unit=" blocks", **_BAR) as blocks:
        return build(folder, blocks, source=f"{NAMES[kind]} of {path.name}", fingerprint=mark, core=core)


def generate(writers: int, seed: int, cache: Path) -> Characters:
    """Generated handwriting; see :mod:`~lightning_fed.datamodules.femnist.handwriting`."""
    here = Path(handwriting.__file__).parent
    code = b"".join((here / name).read_bytes() for name in ("handwriting.py", "glyphs.py", "glyphs.txt"))
    mark = f"generated-{hashlib.sha256(code).hexdigest()[:8]}-{FORMAT}-{writers}-{seed}"
    folder = cache / mark
    if (folder / "meta.json").exists():
        return Characters.open(folder, mark)
    blocks = tqdm(handwriting.write(writers, seed), desc="Writing", total=writers, unit=" writers", **_BAR)
    return build(folder, blocks, source="generated handwriting, not FEMNIST", fingerprint=mark, generated=True)


def detect(path: Path) -> str:
    """Detect the kind of source at ``path``."""
    if not path.exists():
        raise DataError(f"{path}: there is no such file or folder. Wanted {LAYOUTS}; omit the path to generate data.")
    if path.is_file():
        kind = {".npz": "npz", ".parquet": "parquet", ".json": "leaf"}.get(path.suffix)
    else:
        kind = next((kind for kind, patterns in _PATTERNS.items() if any(any(path.glob(p)) for p in patterns)), None)
    if kind is None:
        raise DataError(f"{path}: found nothing to read in it. Wanted {LAYOUTS}.")
    return kind


_PATTERNS = {
    "leaf": ("*.json", "train/*.json", "all_data/*.json"),
    "parquet": ("*.parquet", "data/*.parquet"),
    "nist": ("by_write*",),
}


def fingerprint(path: Path, kind: str) -> str:
    """A digest of the names, sizes, times and ends of the source's files."""
    digest = hashlib.sha256(f"{FORMAT} {kind}".encode())
    for entry in _parts(path, kind):
        stat = entry.stat()
        digest.update(repr((str(entry.relative_to(path)), stat.st_size, stat.st_mtime_ns)).encode())
        if entry.is_file():
            digest.update(_ends(entry))
    return digest.hexdigest()[:32]


def _parts(path: Path, kind: str) -> list[Path]:
    """The files that a source is read from; of an unpacked NIST the folders, which change with their million files."""
    if path.is_file():
        return [path]
    if kind == "leaf":
        return [file for file, _ in leaf.shards(path)]
    if kind == "parquet":
        return sorted(path.rglob("*.parquet"))
    return sorted(p for p in path.rglob("*") if p.is_dir() or p.suffix == ".zip")


def _ends(file: Path) -> bytes:
    with file.open("rb") as opened:
        start = opened.read(PROBE)
        opened.seek(max(0, file.stat().st_size - PROBE))
        return start + opened.read(PROBE)
