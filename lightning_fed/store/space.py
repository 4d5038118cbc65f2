"""Check the free space of a disk."""

from __future__ import annotations

import errno
import shutil
from pathlib import Path


def check_space(folder: Path | str, size: int) -> None:
    """Raise an error with the numbers if the disk of a folder, which need not exist yet, has less than ``size`` left.

    >>> check_space("not/yet", 1)
    >>> check_space(".", 10**18)  # doctest: +ELLIPSIS
    Traceback (most recent call last):
        ...
    OSError: [Errno 28] ... needs 1,000,000,000,000,000,000 bytes, but its disk has only ... left
    """
    folder = Path(folder).absolute()
    there = next(path for path in (folder, *folder.parents) if path.is_dir())
    free = shutil.disk_usage(there).free
    if size > free:
        raise OSError(errno.ENOSPC, f"{folder} needs {size:,} bytes, but its disk has only {free:,} left")
