"""The cache folder for files of later runs, and checks that its files are unchanged and private."""

from __future__ import annotations

import os
import shutil
import stat
import sys
import time
from collections import defaultdict
from contextlib import suppress
from hashlib import sha256
from pathlib import Path

_CHUNK = 2**20
_DAY = 24 * 3600


def default_cache() -> Path:
    """``$LIGHTNING_FED_CACHE``, or ``lightning_fed`` in the user's cache folder.

    That folder is ``$XDG_CACHE_HOME`` or ``~/.cache`` on Linux, ``~/Library/Caches`` on macOS and ``%LOCALAPPDATA%`` on
    Windows.
    """
    if own := os.environ.get("LIGHTNING_FED_CACHE"):
        return Path(own)
    if sys.platform == "darwin":
        return Path.home() / "Library" / "Caches" / "lightning_fed"
    if sys.platform == "win32":
        local = os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local"
        return Path(local) / "lightning_fed" / "Cache"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "lightning_fed"


def digest_of(path: Path) -> str:
    """SHA-256 of a file, read a piece at a time."""
    digest = sha256()
    with path.open("rb") as file:
        while piece := file.read(_CHUNK):
            digest.update(piece)
    return digest.hexdigest()


def private_folder(path: Path) -> Path:
    """Create a folder that only this user may read and write; raise OSError if it belongs to another user."""
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    found = path.lstat()
    if not stat.S_ISDIR(found.st_mode):
        raise OSError(f"{path} is not a folder, but a link or a file. Remove it.")
    if not _is_own(found):
        raise OSError(f"{path} belongs to another user. Set $LIGHTNING_FED_CACHE to a folder of your own.")
    if stat.S_IMODE(found.st_mode) != 0o700:
        path.chmod(0o700)
    return path


def is_own_file(path: Path) -> bool:
    """Whether ``path`` is a regular file that belongs to this user and that no other user may write."""
    try:
        found = path.lstat()
    except OSError:
        return False
    return stat.S_ISREG(found.st_mode) and _is_own(found) and not (_HAS_OWNERS and found.st_mode & 0o022)


#: Windows has no user ids, and its file modes do not say who may write.
_HAS_OWNERS = hasattr(os, "getuid")


def _is_own(found: os.stat_result) -> bool:
    return not _HAS_OWNERS or found.st_uid == os.getuid()


def write_through(path: Path) -> None:
    """Flush a file to the disk, so that an index entry written later never names a file that a crash lost."""
    with path.open("rb") as file:
        os.fsync(file.fileno())


def clean(folder: Path, days: float, most_bytes: int) -> None:
    """Remove what was not used for so many days, then what was used longest ago, until the rest fits ``most_bytes``.

    Files of one name with several suffixes stay or go together; the newest time of change counts as their last use.
    Folders, which interrupted work has left, go after a day.
    """
    now, groups = time.time(), defaultdict[str, list[tuple[Path, os.stat_result]]](list)
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # another process cleans at the same time
            found = path.lstat()
            if not stat.S_ISDIR(found.st_mode):
                groups[path.stem].append((path, found))
            elif now - found.st_mtime > _DAY:
                shutil.rmtree(path, ignore_errors=True)
    kept = 0
    for group in sorted(groups.values(), key=_last_use, reverse=True):
        kept += sum(found.st_size for _, found in group)
        if now - _last_use(group) > days * _DAY or kept > most_bytes:
            for path, _ in group:
                with suppress(OSError):  # gone, or in use where the system does not remove open files
                    path.unlink()


def _last_use(group: list[tuple[Path, os.stat_result]]) -> float:
    return max(found.st_mtime for _, found in group)
