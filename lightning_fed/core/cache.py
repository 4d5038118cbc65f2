"""The cache folder for files of later runs, and checks that its files are unchanged and private."""

from __future__ import annotations

import os
import stat
from hashlib import sha256
from pathlib import Path

_CHUNK = 2**20


def default_cache() -> Path:
    """``$LIGHTNING_FED_CACHE``, or ``lightning_fed`` in the user's cache folder."""
    if own := os.environ.get("LIGHTNING_FED_CACHE"):
        return Path(own)
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
    return stat.S_ISREG(found.st_mode) and _is_own(found) and not found.st_mode & 0o022


def _is_own(found: os.stat_result) -> bool:
    return not hasattr(os, "getuid") or found.st_uid == os.getuid()


def write_through(path: Path) -> None:
    """Flush a file to the disk, so that an index entry written later never names a file that a crash lost."""
    with path.open("rb") as file:
        os.fsync(file.fileno())
