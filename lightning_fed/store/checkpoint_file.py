"""Write checkpoint files completely or not at all, with a checksum over every byte.

A sealed file is a ZIP archive as ``torch.save`` writes it, with the checksum in the archive's comment. So
``torch.load``, ``Trainer.test`` and ``load_from_checkpoint`` read it without this module.
"""

from __future__ import annotations

import os
import re
import struct
from collections.abc import Mapping
from hashlib import sha256
from pathlib import Path
from typing import IO, Any, cast

import torch

from lightning_fed.store import durable

VERSION = 1

_END = struct.Struct("<4s4H2LH")  # end of central directory; its last field is the length of the comment
_SEAL = re.compile(rb"lightning_fed checkpoint (\d{4}) sha256 ([0-9a-f]{64})")
_LENGTH = len(b"lightning_fed checkpoint 0001 sha256 ") + 64
_PIECE = 2**22


class DamagedCheckpointError(RuntimeError):
    """A checkpoint differs from what was written; the message names the file and the defect.

    >>> str(DamagedCheckpointError(Path("last.ckpt"), "it is empty"))
    'last.ckpt is damaged: it is empty'
    """

    def __init__(self, path: Path, what: str) -> None:
        self.path, self.what = path, what
        super().__init__(f"{path} is damaged: {what}")


def write_sealed(payload: Mapping[str, Any], path: Path | str) -> None:
    """Save a checkpoint under a temporary name, seal it, and rename it; on any failure the previous file stays.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "last.ckpt"
    >>> write_sealed({"x": torch.ones(2)}, path)
    >>> read_sealed(path), torch.load(path, weights_only=True)
    ({'x': tensor([1., 1.])}, {'x': tensor([1., 1.])})
    """
    with durable.complete(Path(path), _bytes(payload)) as part:
        with part.open("wb") as file:
            _save(payload, file)
        durable.point("checkpoint: saved")
        seal(part)
        durable.point("checkpoint: sealed")


def _save(payload: Mapping[str, Any], file: Any) -> None:
    noting = _Noting(file)
    try:
        torch.save(payload, cast(IO[bytes], noting))
    except BaseException as error:
        raise noting.error or error from None  # torch replaces the disk's error by its own


class _Noting:
    """A file that keeps the error of a failed write."""

    def __init__(self, file: Any) -> None:
        self.file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            written: int = self.file.write(data)
        except OSError as error:
            self.error = error
            raise
        return written

    def flush(self) -> None:
        self.file.flush()


def _bytes(payload: Any) -> int:
    if isinstance(payload, torch.Tensor):
        return payload.nbytes
    if isinstance(payload, Mapping):
        return sum(map(_bytes, payload.values()))
    return sum(map(_bytes, payload)) if isinstance(payload, (list, tuple)) else 0


def seal(path: Path) -> None:
    """Write the checksum of a ZIP archive into its comment, in place; only for a file still under a temporary name.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "a.ckpt"
    >>> torch.save({}, path); seal(path); verify(path)
    """
    with path.open("r+b") as file:
        file.seek(0, os.SEEK_END)
        size = file.tell()
        file.seek(max(0, size - _END.size))
        end = file.read(_END.size)
        if not _is_end(end, 0):
            raise DamagedCheckpointError(path, "it is not a ZIP archive without a comment, as torch.save writes it")
        file.seek(size - 2)
        file.write(_LENGTH.to_bytes(2, "little"))
        file.flush()
        text = b"lightning_fed checkpoint %04d sha256 " % VERSION
        digest = _digest(path, size, text)
        file.write(text + digest.encode())


def _is_end(end: bytes, comment: int) -> bool:
    if len(end) != _END.size:
        return False
    fields = _END.unpack(end)
    return bool(fields[0] == b"PK\5\6" and fields[-1] == comment)


def _digest(path: Path, size: int, text: bytes) -> str:
    """SHA-256 of the first ``size`` bytes of a file and of the seal's own text."""
    digest = sha256()
    with path.open("rb") as file:
        while size and (piece := file.read(min(size, _PIECE))):
            digest.update(piece)
            size -= len(piece)
    digest.update(text)
    return digest.hexdigest()


def verify(path: Path | str) -> None:
    """Raise DamagedCheckpointError if a file is not what :func:`write_sealed` wrote.

    >>> verify("nowhere.ckpt")
    Traceback (most recent call last):
        ...
    lightning_fed.store.checkpoint_file.DamagedCheckpointError: nowhere.ckpt is damaged: No such file or directory
    """
    path = Path(path)
    try:
        size = path.stat().st_size
        if size == 0:
            raise DamagedCheckpointError(path, "it is empty")
        with path.open("rb") as file:
            begin = file.read(4)
            file.seek(max(0, size - _LENGTH - _END.size))
            tail = file.read()
        found = _SEAL.fullmatch(tail[-_LENGTH:])
        if found is None or not _is_end(tail[:-_LENGTH], _LENGTH):
            raise DamagedCheckpointError(path, _why_unsealed(begin, tail))
        version, digest = int(found[1]), found[2].decode()
        if version != VERSION:
            raise DamagedCheckpointError(path, f"format version {version}, this program reads {VERSION}")
        if _digest(path, size - _LENGTH, tail[-_LENGTH:-64]) != digest:
            raise DamagedCheckpointError(path, "checksum differs")
    except OSError as error:
        raise DamagedCheckpointError(path, error.strerror or str(error)) from error


def _why_unsealed(begin: bytes, tail: bytes) -> str:
    if begin != b"PK\3\4":
        return "it is not a checkpoint of torch.save"
    if _is_end(tail[-_END.size :], 0):
        return "it has no seal: it was written by another program, or by another version of lightning_fed"
    return "it is truncated, or its seal is damaged"


def is_unsealed(path: Path | str) -> bool:
    """Whether a file is a whole archive of ``torch.save`` without a seal: another program wrote it.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "a.ckpt"
    >>> torch.save({}, path); is_unsealed(path)
    True
    >>> seal(path); is_unsealed(path)
    False
    """
    try:
        with Path(path).open("rb") as file:
            begin = file.read(4)
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - _END.size))
            return begin == b"PK\3\4" and _is_end(file.read(), 0)
    except OSError as error:
        raise DamagedCheckpointError(Path(path), error.strerror or str(error)) from error


def read_sealed(path: Path | str, weights_only: bool = True) -> Any:
    """Verify a checkpoint and load it on the CPU; nothing in it is executed, unless ``weights_only`` is False.

    >>> from tempfile import mkdtemp
    >>> path = Path(mkdtemp()) / "last.ckpt"
    >>> write_sealed({"epoch": 3}, path); read_sealed(path)
    {'epoch': 3}
    """
    verify(path)
    return torch.load(path, map_location="cpu", weights_only=weights_only)
