"""Tell errors of a command from bugs: the first are one line and exit code 2, the second keep their traceback."""

from __future__ import annotations

import argparse
import inspect
import re
import traceback
import zipfile
from difflib import get_close_matches
from pathlib import Path
from pickle import UnpicklingError
from types import ModuleType
from typing import Any, NoReturn

import torch

from lightning_fed import algorithms, callbacks, datamodules, models, prox, sampling, tracking
from lightning_fed.engines import ClientError, DivergenceError
from lightning_fed.lightning import MisconfigurationException, pl
from lightning_fed.lightning.package import ROOTS
from lightning_fed.store.checkpoint_file import DamagedCheckpointError
from lightning_fed.store.damage import DamagedRecordError
from lightning_fed.store.database import VersionError
from lightning_fed.store.durable import WriteError
from lightning_fed.store.lease import LeaseError

#: By the last word of a key: whose classes the command line knows by short names.
KNOWN: dict[str, tuple[ModuleType, ...]] = {
    "algorithm": (algorithms,),
    "data": (datamodules,),
    "model": (models,),
    "g": (prox,),
    "sampler": (sampling,),
    "callbacks": (callbacks, pl.callbacks),
    "logger": (tracking, pl.loggers),
}

#: Errors whose messages tell a user everything.
_REFUSALS = (
    DamagedCheckpointError,
    DamagedRecordError,
    DivergenceError,
    LeaseError,
    MisconfigurationException,
    VersionError,
    WriteError,
)

#: Packages that refuse settings with a ``raise`` of their own.
_CHECKING = ("lightning_fed", *ROOTS)

#: Words of Lightning's ``ckpt_path`` that are no paths.
_WORDS = re.compile(r"best|last|hpc|registry.*|.*://.*", re.DOTALL)

#: Lines of jsonargparse's messages that repeat others, or tell of alternatives that nobody meant.
_NOISE = re.compile(
    r"Does not validate against any of the Union subtypes|Subtypes: .*|Errors:|Given value type: .*"
    r"|Given value: Namespace.*|Expected a <class 'NoneType'>.*|Expected a path but .* either not accessible or invalid"
)


class OneLineParser(argparse.ArgumentParser):
    """Reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {one_line(message)}\n")


def refusal(error: BaseException) -> str | None:
    """The message of an error that the settings of a command have caused; None for a bug.

    Settings are refused by a ``raise`` of this package or of Lightning, by the operating system for a file it names, or
    by torch for a model of this package that does not fit the data. All other errors come from somebody's code.
    """
    if isinstance(error, _REFUSALS):
        return str(error)
    if isinstance(error, OSError) and error.filename is not None:
        return f"{error.strerror}: {error.filename}"
    if isinstance(error, (TypeError, ValueError, FileNotFoundError)) and is_raised(error, _CHECKING):
        return str(error)
    if _is_misfit(error.__cause__ if isinstance(error, ClientError) else error):
        return f"The model does not fit the data: {error}"
    return None


def refusal_of_value(error: BaseException) -> str | None:
    """As ``refusal``, of an error in a constructor: any class may refuse the values that a command gave it."""
    return str(error) if isinstance(error, (TypeError, ValueError)) and is_raised(error) else refusal(error)


def unwrapped(error: Exception) -> Exception:
    """The error of a constructor, without what jsonargparse says around it."""
    while isinstance(error.__cause__, Exception) and is_raised(error, ("jsonargparse",)):
        error = error.__cause__
    return error


def is_raised(error: BaseException, packages: tuple[str, ...] | None = None) -> bool:
    """Whether a ``raise`` statement, of one of the ``packages``, raised an error, and not an operation that failed."""
    frames = list(traceback.walk_tb(error.__traceback__))
    if not frames or not (traceback.extract_tb(error.__traceback__)[-1].line or "").startswith("raise "):
        return False
    return packages is None or _package(frames[-1][0]) in packages


def _is_misfit(error: BaseException | None) -> bool:
    """Whether torch refused a tensor that a model of this package gave it, without code of a user between them."""
    if not isinstance(error, (IndexError, RuntimeError, ValueError)):
        return False
    frames = [frame for frame, _ in traceback.walk_tb(error.__traceback__)]
    names = [str(frame.f_globals.get("__name__")) for frame in frames]
    met = False
    while names and (names[-1].split(".")[0] in ("torch", "torchmetrics") or names[-1].startswith(models.__name__)):
        met |= names.pop().startswith(models.__name__)
    return met and bool(names) and names[-1].split(".")[0] in _CHECKING


def _package(frame: Any) -> str:
    return str(frame.f_globals.get("__name__")).split(".")[0]


def one_line(message: str, longest: int = 800) -> str:
    """A message in one line; of jsonargparse's, what is said of the alternatives that were meant.

    >>> one_line('''Parser key "rounds":
    ...   Does not validate against any of the Union subtypes
    ...   Subtypes: [<class 'int'>, <class 'NoneType'>]
    ...   Errors:
    ...     - Expected a <class 'int'>
    ...     - Expected a <class 'NoneType'>
    ...   Given value type: <class 'str'>
    ...   Given value: two''')
    'Parser key "rounds": Expected a int; Given value: two'
    >>> one_line('Parser key "sampling": Expected a dot import path string: Unifrom')  # doctest: +ELLIPSIS
    'Parser key "sampling": There is no class Unifrom. Did you mean Uniform? lightning_fed.sampling has Available, ...
    """
    lines = [line.strip().removeprefix("- ") for line in message.splitlines() if line.strip()]
    kept = list(dict.fromkeys(line for line in lines if not _NOISE.fullmatch(line))) or lines
    text = "; ".join(kept).replace(":; ", ": ")
    text = re.sub(r"<class '(?:\w+\.)*(\w+)'>", r"\1", text)
    text = re.sub(r"Expected a dot import path string: (\w+)", lambda found: _unknown(found[1], _key(found)), text)
    return text if len(text) <= longest else f"{text[:longest]} ..."


def _key(found: re.Match[str]) -> str:
    """The last word of the key before a place in a message."""
    keys = re.findall(r'key "([\w.]+)"', found.string[: found.start()])
    return keys[-1].rpartition(".")[2] if keys else ""


def _unknown(name: str, key: str) -> str:
    """Name the nearest class that the key, or else any key, may have, and the others of its kind."""
    kinds = [module for modules in ([KNOWN[key]] if key in KNOWN else KNOWN.values()) for module in modules]
    lower = {known.lower(): known for known in reversed(_classes(*kinds))}
    like = [lower[near] for near in get_close_matches(name.lower(), lower, n=1)]
    kind = next((module for module in kinds if like and like[0] in _classes(module)), kinds[0])
    nearest = f"Did you mean {like[0]}?" if like else "Give package.Class, or a short name:"
    return f"There is no class {name}. {nearest} {kind.__name__} has {', '.join(_classes(kind))}."


def _classes(*modules: ModuleType) -> list[str]:
    return [
        name
        for module in modules
        for name in module.__all__
        if inspect.isclass(found := getattr(module, name)) and not inspect.isabstract(found)
    ]


def check_checkpoint(ckpt_path: str | Path | None) -> None:
    """Refuse a ``ckpt_path`` that is no checkpoint; Lightning would fail on it with an error about something else."""
    if ckpt_path is None or _WORDS.fullmatch(str(ckpt_path)):
        return
    path = Path(ckpt_path)
    if not path.exists():
        raise ValueError(f"ckpt_path: there is no file {path}.")
    if not path.is_file():
        raise ValueError(f"ckpt_path: {path} is a folder. Give the path of a checkpoint in it.")
    if not zipfile.is_zipfile(path):
        raise ValueError(f"ckpt_path: {path} is not a checkpoint, or not a complete one.")
    try:
        content = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    except UnpicklingError:  # with objects of other classes: Lightning decides whether to load them
        return
    except RuntimeError as error:  # a ZIP archive of something else
        raise ValueError(f"ckpt_path: {path} is not a checkpoint: torch cannot read it.") from error
    if not isinstance(content, dict) or "pytorch-lightning_version" not in content:
        raise ValueError(f"ckpt_path: {path} is not a checkpoint of a Trainer, but something else that torch saved.")
