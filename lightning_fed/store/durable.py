"""Make changes on disk durable: the only module of the store that writes, links or removes files.

Every step after which a crash would leave the disk in another state calls :func:`point`.
"""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO, cast

Buffer = bytes | bytearray | memoryview

_PIECE = 2**24  # bytes per system call: one call writes 2 GB at most
_NO_LINKS = {errno.EXDEV, errno.EPERM, errno.EMLINK, errno.ENOTSUP, errno.ENOSYS, errno.EACCES, errno.EINVAL}


class WriteError(OSError):
    """A file could not be made durable; the message names its path and the bytes wanted.

    >>> str(WriteError.of(Path("run/a"), 8, OSError(errno.ENOSPC, "No space left on device")))
    '[Errno 28] Cannot write run/a (8 bytes): No space left on device'
    """

    @classmethod
    def of(cls, path: Path, size: int, cause: OSError) -> WriteError:
        """The error that a failed write of ``size`` bytes to ``path`` becomes."""
        return cls(cause.errno, f"Cannot write {path} ({size:,} bytes): {cause.strerror or cause}")


def point(name: str) -> None:
    """Mark a durability point. Does nothing; tests replace it to end the process there.

    >>> point("write: temporary synced")
    """


def temporary(path: Path) -> Path:
    """The name under which a file is written before it is complete, in the folder of the file.

    It depends on the file's name alone, so that the next attempt overwrites the leftover of a killed process.

    >>> temporary(Path("run/last.ckpt")).as_posix()
    'run/.last.ckpt.part'
    """
    return path.with_name(f".{path.name[:50]}.part")


def write(path: Path, buffers: Iterable[Buffer], *, sync: bool = True) -> int:
    """Write a file completely or not at all; return its size. Without ``sync``, the caller syncs the folder later.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "a"
    >>> write(path, [b"one", b"two"]), path.read_bytes()
    (6, b'onetwo')
    """
    views = [memoryview(buffer).cast("B") for buffer in buffers]
    with complete(path, sum(len(view) for view in views), sync=sync) as part:
        with part.open("wb", buffering=0) as file:
            for view in views:
                for start in range(0, len(view), _PIECE):
                    _write_all(file.fileno(), view[start : start + _PIECE])
    return sum(len(view) for view in views)


def create(path: Path) -> BinaryIO:
    """Create a file for appending; its name is durable.

    >>> from tempfile import mkdtemp
    >>> create(Path(mkdtemp()) / "a").close()
    """
    try:
        file = path.open("xb", buffering=0)
    except OSError as error:
        raise WriteError.of(path, 0, error) from error
    point("create: made")
    sync_folder(path.parent)
    return cast(BinaryIO, file)


def append(descriptor: int, path: Path, buffers: Iterable[Buffer]) -> int:
    """Append to a file durably; return the offset. After any error the file has its old length.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "a"
    >>> with path.open("ab") as file:
    ...     append(file.fileno(), path, [b"one"]), append(file.fileno(), path, [b"two"])
    (0, 3)
    """
    joined = b"".join(buffers)
    start = os.lseek(descriptor, 0, os.SEEK_END)
    try:
        point("append: begin")
        _write_all(descriptor, memoryview(joined))
        point("append: written")
        _sync_file(descriptor)
    except BaseException as error:
        with suppress(OSError):
            os.ftruncate(descriptor, start)
        if isinstance(error, OSError):
            raise WriteError.of(path, len(joined), error) from error
        raise
    point("append: synced")
    return start


def _write_all(descriptor: int, view: memoryview) -> None:
    while len(view):
        view = view[os.write(descriptor, view) :]


@contextmanager
def complete(path: Path, size: int = 0, *, sync: bool = True) -> Iterator[Path]:
    """Yield a temporary file next to ``path``; at the end sync it and rename it to ``path``. On any error, remove it.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "a"
    >>> with complete(path) as part:
    ...     _ = part.write_text("one")
    >>> path.read_text(), part.exists()
    ('one', False)
    """
    part = temporary(path)
    try:
        point("write: begin")
        yield part
        point("write: temporary written")
        _sync(part)
        point("write: temporary synced")
        os.replace(part, path)
        point("write: renamed")
    except BaseException as error:
        with suppress(OSError):
            part.unlink()
        if isinstance(error, OSError) and not isinstance(error, WriteError):
            raise WriteError.of(path, size, error) from error
        raise
    if sync:
        sync_folder(path.parent)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        _sync_file(descriptor)
    finally:
        os.close(descriptor)


# fdatasync skips the file's times, which the store does not need
_sync_file = getattr(os, "fdatasync", os.fsync)


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable.

    >>> sync_folder(Path("."))
    """
    try:
        _sync(folder)
    except OSError as error:
        if error.errno != errno.EINVAL:  # some network file systems cannot sync a folder
            raise WriteError.of(folder, 0, error) from error
    point("folder: synced")


def make_folder(folder: Path) -> Path:
    """Create a folder and its parents, durably.

    >>> from tempfile import mkdtemp
    >>> make_folder(Path(mkdtemp()) / "a" / "b").is_dir()
    True
    """
    if folder.is_dir():
        return folder
    make_folder(folder.parent)
    try:
        folder.mkdir(exist_ok=True)
    except OSError as error:
        raise WriteError.of(folder, 0, error) from error
    point("folder: made")
    sync_folder(folder.parent)
    return folder


def link(source: Path, target: Path) -> bool:
    """Link a file to a second name, or copy it if the disk does not support links; return whether it was linked.

    The caller syncs the folder of ``target``, once for many links.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> _ = write(folder / "a", [b"one"])
    >>> link(folder / "a", folder / "b"), (folder / "b").read_bytes()
    (True, b'one')
    """
    try:
        os.link(source, target)
    except FileNotFoundError:
        raise
    except FileExistsError:
        remove(target)
        return link(source, target)
    except OSError as error:
        if error.errno not in _NO_LINKS:
            raise WriteError.of(target, 0, error) from error
        with complete(target, source.stat().st_size, sync=False) as part:
            shutil.copyfile(source, part)
        return False
    point("link: made")
    return True


def link_symbolically(source: Path, target: Path) -> None:
    """Have ``target`` point to ``source`` from now on, without a moment in which there is no ``target``.

    It is a copy where the disk does not support symbolic links.

    >>> from tempfile import mkdtemp
    >>> folder = Path(mkdtemp())
    >>> _ = write(folder / "a", [b"one"])
    >>> link_symbolically(folder / "a", folder / "last"); (folder / "last").readlink().as_posix()
    'a'
    """
    part = temporary(target)
    remove(part)
    try:
        part.symlink_to(os.path.relpath(source, target.parent))
    except OSError:  # not supported, or not allowed
        with complete(target, source.stat().st_size) as part:
            shutil.copyfile(source, part)
        return
    point("symbolic link: made")
    os.replace(part, target)
    point("symbolic link: renamed")


def cut(path: Path, size: int) -> None:
    """Truncate a file to ``size``, to remove an append that a killed process did not finish.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "a"
    >>> _ = path.write_bytes(b"onetw"); cut(path, 3); path.read_bytes()
    b'one'
    """
    if path.stat().st_size > size:
        os.truncate(path, size)
        point("cut: done")


def rename(path: Path, target: Path) -> None:
    """Rename a file in its folder; like a removal, a power failure may undo it."""
    os.replace(path, target)
    point("rename: done")


def remove(path: Path) -> None:
    """Remove a file if it exists. A power failure may undo the removal, so use it for garbage only.

    >>> remove(Path("not there"))
    """
    with suppress(FileNotFoundError):
        path.unlink()
        point("remove: done")


def remove_folder(folder: Path) -> None:
    """Remove a folder and its content, if it exists; a symbolic link is removed, not followed.

    >>> remove_folder(Path("not there"))
    """
    if folder.is_symlink():
        remove(folder)
    elif folder.is_dir():
        shutil.rmtree(folder)
        point("remove: done")
