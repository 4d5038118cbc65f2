"""Uploads of checkpoints (``log_model``) of a federation: the server's model alone, whatever tracker is used."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
import weakref
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from pathlib import Path
from tempfile import mkdtemp
from typing import Any

import torch

from lightning_fed.core.server_part import server_part
from lightning_fed.lightning import Logger, WandbLogger


class ServerOnly:
    """A checkpoint callback as loggers see it: its paths lead to copies that hold the server's model alone.

    Loggers learn from the callback which files to upload, now or at the end of the fit. A copy is made when a logger
    asks for its path, in a temporary folder, and has the time of its original, by which loggers know what is new.

    Args:
        callback: the ``ModelCheckpoint`` of the fit.
    """

    def __init__(self, callback: Any) -> None:
        vars(self)["_callback"] = callback
        vars(self)["_folder"] = Path(mkdtemp(prefix="lightning-fed-"))
        weakref.finalize(self, shutil.rmtree, self._folder, ignore_errors=True)

    @property  # type: ignore[misc]
    def __class__(self) -> type:  # as weakref's proxies, which is what loggers get from Lightning
        kind: type = self._callback.__class__
        return kind

    def __getattr__(self, name: str) -> Any:
        return self._shown(getattr(self._callback, name))

    def _shown(self, value: Any) -> Any:
        """A value of the callback with paths of copies in place of its paths."""
        if isinstance(value, Mapping):
            return {self._shown(key): self._shown(part) for key, part in value.items()}
        if not isinstance(value, str | Path) or not os.path.isabs(value):
            return value
        place = getattr(self._callback, "dirpath", None)
        if place is not None and Path(value) == Path(place):
            return type(value)(self._folder)
        return type(value)(self._copy(Path(value))) if os.path.isfile(value) else value

    def _copy(self, path: Path) -> Path:
        """The server's part of a checkpoint, in a file of the same name; no file if it cannot be made."""
        copy, time = Path(self._folder, path.name), path.stat().st_mtime_ns
        if not copy.exists() or copy.stat().st_mtime_ns != time:
            copy.unlink(missing_ok=True)
            if (content := _read(path)) is not None:
                torch.save(content, copy)
                os.utime(copy, ns=(time, time))
        return copy


def _read(path: Path) -> dict[str, Any] | None:
    try:
        # a file that this fit has written, whose hyper-parameters may be any objects; clients' tensors are not read
        return server_part(torch.load(path, map_location="cpu", mmap=True, weights_only=False))
    except (RuntimeError, KeyError, TypeError, pickle.UnpicklingError) as error:
        warnings.warn(
            f"{path} is not uploaded: it holds what clients remember, and the server's model cannot be taken out of it"
            f" ({type(error).__name__}: {str(error).partition(chr(10))[0]}). Use Lightning's own TorchCheckpointIO, or"
            " log_model=False.",
            stacklevel=2,
        )
        return None


def upload_server_only(loggers: Iterable[Logger]) -> None:
    """Have loggers that upload checkpoints upload copies with the server's model alone: W&B, MLflow and others."""
    for logger in loggers:
        own = getattr(type(logger), "after_save_checkpoint", Logger.after_save_checkpoint)
        if own is not Logger.after_save_checkpoint and "after_save_checkpoint" not in vars(logger):
            vars(logger)["after_save_checkpoint"] = partial(_show, {}, logger.after_save_checkpoint)
            if isinstance(logger, WandbLogger):
                logger.add_file_policy = "mutable"  # W&B keeps a file of its own, because ours is temporary


def _show(views: dict[int, ServerOnly], hook: Callable[[Any], None], callback: Any) -> None:
    if id(callback) not in views:  # the view keeps the callback, or Lightning's one proxy of it, and so its id
        views[id(callback)] = ServerOnly(callback)
    hook(views[id(callback)])
