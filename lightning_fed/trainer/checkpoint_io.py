"""Checkpoints that are whole or absent, with records of clients' memories beside them."""

from __future__ import annotations

import os
import secrets
import warnings
from collections.abc import Callable, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from lightning_fed.core.server_part import RECORDS
from lightning_fed.lightning import AsyncCheckpointIO, CheckpointIO, TorchCheckpointIO, pl
from lightning_fed.store import (
    DamagedCheckpointError,
    DamagedRecordError,
    DiskStore,
    durable,
    is_unsealed,
    read_manifest,
    read_sealed,
    write_sealed,
)


class FederatedCheckpointIO(CheckpointIO):
    """Writes a checkpoint beside its target, with a checksum over every byte, and renames it into place.

    Memories that are kept on disk are not in the file: it names a folder beside it, with links to their records, that
    is complete before the file appears. The folder belongs to one file, and is removed with it.

    Args:
        inner: the trainer's own. If it is a user's, it writes and reads the file; the folder is made all the same.
        store: gives the store whose records belong to a checkpoint; None where memories are in the file.
    """

    def __init__(self, inner: CheckpointIO, store: Callable[[], DiskStore | None]) -> None:
        if isinstance(inner, AsyncCheckpointIO):
            raise ValueError(
                "AsyncCheckpointIO writes a checkpoint while rounds go on, so that it would name records of clients"
                " that have changed since. Omit it: a checkpoint of a federation writes only what a round has changed."
            )
        self.inner, self.store = inner, store
        self._newest: Path | None = None
        self._own = type(inner) is TorchCheckpointIO

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        store = self.store() if "callbacks" in checkpoint else None
        if "://" in str(path):
            if store is not None:
                raise ValueError(
                    f"{path} is not a local file, and records of clients must be beside it. Save to a local folder, or"
                    ' use FederatedServer(store="memory").'
                )
            self.inner.save_checkpoint(checkpoint, path, storage_options)
            return
        path = Path(os.path.realpath(path))
        path.parent.mkdir(parents=True, exist_ok=True)
        _tidy(path.parent)
        folder = path.with_name(f"{path.name}.records-{secrets.token_hex(4)}")
        before = _version(path)
        try:
            if store is not None:
                checkpoint = {**checkpoint, RECORDS: {"folder": folder.name, "manifest": store.snapshot(folder)}}
            if self._own:
                write_sealed(checkpoint, path)
            else:
                self.inner.save_checkpoint(checkpoint, path, storage_options)
        except BaseException:
            if _version(path) == before:  # after the rename, for instance on Ctrl-C, the new file needs the folder
                durable.remove_folder(folder)
            raise
        self._newest = path
        _remove_records(path, but=folder.name)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if "://" in str(path):
            return dict(self.inner.load_checkpoint(path, map_location, weights_only))
        real = Path(os.path.realpath(path))
        _tidy(real.parent)
        try:
            return self._load(real, map_location, weights_only)
        except (DamagedCheckpointError, DamagedRecordError) as error:
            if not _may_be_the_word_last(path):
                raise
            return self._fall_back(real, error)

    def _load(self, path: Path, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        if not self._own or is_unsealed(path):
            loaded = dict(self.inner.load_checkpoint(path, map_location, weights_only))
        else:
            loaded = dict(read_sealed(path, weights_only=weights_only is not False))
        if (folder := records_of(path, loaded)) is not None:
            loaded[RECORDS] = {**loaded[RECORDS], "path": str(folder)}
        return loaded

    def _fall_back(self, path: Path, error: Exception) -> dict[str, Any]:
        """The newest other checkpoint beside a damaged ``last`` one."""
        others = {p.resolve() for p in path.parent.glob("*.ckpt")} - {path}
        for other in sorted((p for p in others if p.is_file()), key=lambda p: p.stat().st_mtime, reverse=True):
            try:
                loaded = self._load(other)
            except (DamagedCheckpointError, DamagedRecordError):
                continue
            warnings.warn(f"{error}. The run goes on from {other}, the newest good checkpoint beside it.", stacklevel=2)
            return loaded
        raise error

    def remove_checkpoint(self, path: Any) -> None:
        if "://" in str(path):
            self.inner.remove_checkpoint(path)
            return
        path = Path(path)
        if path.is_symlink():  # ModelCheckpoint's last.ckpt: the records belong to the file that it points to
            path.unlink()
            return
        self._forward_links(path)
        if self._own and path.is_file():
            durable.rename(path, _doomed(path))
        else:
            self.inner.remove_checkpoint(path)
        durable.point("checkpoint: removed")
        _remove_records(path)
        durable.remove(_doomed(path))

    def _forward_links(self, path: Path) -> None:
        """Have links to a checkpoint point to the newest one before it is removed: a kill must not leave them dead."""
        newest, real = self._newest, Path(os.path.realpath(path))
        if newest is not None and newest != real and newest.exists():
            for link in path.parent.glob("*.ckpt"):
                if link.is_symlink() and Path(os.path.realpath(link)) == real:
                    durable.link_symbolically(newest, link)

    def teardown(self) -> None:
        self.inner.teardown()


def link_last(trainer: pl.Trainer, filepath: str, linkpath: str) -> None:
    """Link ``last`` to a checkpoint. Lightning's own removes the old link first, and a kill would leave none."""
    source, target = Path(filepath).absolute(), Path(linkpath).absolute()
    if trainer.is_global_zero and source != target:
        if target.is_dir() and not target.is_symlink():
            durable.remove_folder(target)
        durable.link_symbolically(source, target)
    trainer.strategy.barrier()


def _version(path: Path) -> tuple[int, int] | None:
    """What changes when a file is replaced or written; None if there is no file."""
    if not path.exists():
        return None
    found = path.stat()
    return found.st_ino, found.st_mtime_ns


def records_of(path: Path, checkpoint: Mapping[str, Any]) -> Path | None:
    """The folder of records that belongs to the file ``path``, its manifest verified; None if it has no records."""
    if (named := checkpoint.get(RECORDS)) is None:
        return None
    folder = path.parent / str(named["folder"])
    if read_manifest(folder) != named["manifest"]:
        raise DamagedRecordError(folder, "manifest", f"it is not the one that {path.name} was saved with")
    return folder


def _remove_records(path: Path, but: str = "") -> None:
    """Remove the folders of records that belong to a checkpoint's file."""
    for folder in path.parent.glob(f"{_literal(path.name)}.records-*"):
        if folder.name != but:
            durable.remove_folder(folder)


def _may_be_the_word_last(path: Any) -> bool:
    """Whether ``path`` may come from ``ckpt_path="last"``, for which Lightning gives an absolute path as a string.

    A relative path, and a ``Path``, have been given by name. Nothing tells where an absolute string has come from.
    """
    return isinstance(path, str) and os.path.isabs(path) and Path(path).name.startswith("last")


def _doomed(path: Path) -> Path:
    """The name of a checkpoint's file while its records are removed: it tells the next save what a kill has left."""
    return path.with_name(f".{path.name}.removed")


def _tidy(folder: Path) -> None:
    """Remove what a killed process was about to remove or to rename."""
    for part in folder.glob(".*.part"):
        if part.is_symlink():
            durable.remove(part)
    for doomed in folder.glob(".*.removed"):
        with suppress(FileNotFoundError):  # of a run that is just removing it
            _remove_records(doomed.with_name(doomed.name[1:].removesuffix(".removed")))
        durable.remove(doomed)


def _literal(name: str) -> str:
    """A name in which glob sees no pattern."""
    return "".join(f"[{c}]" if c in "*?[" else c for c in name)
