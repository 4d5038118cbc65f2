"""A folder for downloads, whose files are moved to their place when all are there."""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

#: Begins the name of the folder, within that of the data.
PREFIX = ".download-"
#: Seconds after which such a folder is taken for that of a process that was killed.
DAY = 86_400
#: Ends of the names of archives that somebody may have put there, to be unpacked in the place of a download.
ARCHIVES = {".bz2", ".gz", ".mat", ".tar", ".tgz", ".xz", ".zip"}


@contextmanager
def staged(root: Path) -> Iterator[Path]:
    """A new folder beside the data of ``root``: merged into it in the end, deleted after an error.

    torchvision takes a folder as complete that a killed process has unpacked in part, and reads what is there. Archives
    that are in ``root`` are in the new folder too.

    >>> from tempfile import TemporaryDirectory
    >>> with TemporaryDirectory() as name:
    ...     with staged(Path(name, "data")) as folder:
    ...         (folder / "images").mkdir()
    ...     sorted(str(path.relative_to(name)) for path in Path(name).rglob("*"))
    ['data', 'data/images']
    """
    is_new = not root.exists()
    root.mkdir(parents=True, exist_ok=True)
    for old in root.glob(f"{PREFIX}*"):
        if old.stat().st_mtime < time.time() - DAY:
            shutil.rmtree(old, ignore_errors=True)
    archives = [path for path in root.rglob("*") if path.suffix in ARCHIVES and path.is_file()]
    folder = Path(tempfile.mkdtemp(prefix=PREFIX, dir=root))
    try:
        _link(archives, root, folder)
        yield folder
        for path in folder.iterdir():
            _move(path, root / path.name)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        if is_new:
            with suppress(OSError):  # it is not empty
                root.rmdir()


def _link(paths: Iterable[Path], root: Path, folder: Path) -> None:
    for path in paths:
        link = folder / path.relative_to(root)
        link.parent.mkdir(parents=True, exist_ok=True)
        with suppress(OSError):  # it is downloaded where files cannot be linked
            link.hardlink_to(path)


def _move(path: Path, place: Path) -> None:
    """Rename a file or a folder; merge it with a folder that is there."""
    if path.is_dir() and place.is_dir():
        for entry in path.iterdir():
            _move(entry, place / entry.name)
    else:
        path.replace(place)
