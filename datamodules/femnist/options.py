"""Groups of arguments of :class:`~lightning_fed.datamodules.FEMNIST`, each also given as a mapping.

>>> as_options(Split, {"by": "user", "train_fraction": 0.5}, "split")
Split(by='user', train_fraction=0.5)
>>> as_options(Split, "user", "split", shorthand="by")
Split(by='user', train_fraction=0.9)
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from lightning_fed.core.validation import one_of, positive, whole

Kind = Literal["auto", "leaf", "npz", "parquet", "nist"]
By = Literal["auto", "given", "sample", "user"]

OptionsT = TypeVar("OptionsT")

#: Former arguments of FEMNIST, and what to write now.
MOVED = {
    "download": "source={'kind': 'nist', 'download': True}",
    "cache_dir": "source={'cache_dir': FOLDER}",
    "core": "selection={'core': True}",
    "fraction": "selection={'fraction': 0.5}",
    "min_samples": "selection={'min_samples': 100}",
    "train_fraction": "split={'train_fraction': 0.9}",
    "dtype": "pixels={'dtype': 'float64'}",
    "invert": "pixels={'invert': True}",
}


@dataclass(frozen=True)
class Source:
    """How to read the data at FEMNIST's ``path``.

    Args:
        kind: layout of the files; "auto" detects it.
        download: whether to fetch the data of ``kind`` "nist" or "parquet" into ``path``, unless they are there.
        cache_dir: parent of the caches; by default ``$LIGHTNING_FED_CACHE``, or in the user's cache folder.
    """

    kind: Kind = "auto"
    download: bool = False
    cache_dir: str | Path | None = None

    def __post_init__(self) -> None:
        if self.cache_dir is not None:
            object.__setattr__(self, "cache_dir", str(self.cache_dir))  # a plain value, as checkpoints can hold it
        one_of(self, "kind", ("auto", "leaf", "npz", "parquet", "nist"))


@dataclass(frozen=True)
class Selection:
    """Which characters and writers take part; LEAF's options.

    Args:
        core: whether to take only writers that the source marks as core: enough digits, upper and lower case letters.
        fraction: share of all characters: whole writers at random until it is reached.
        min_samples: least number of characters of a writer; writers with fewer are left out.
    """

    core: bool = False
    fraction: float = 1.0
    min_samples: int = 0

    def __post_init__(self) -> None:
        positive(self, "fraction", "It is the share of all characters to take.", upper=1)
        whole(self, "min_samples", 0)


@dataclass(frozen=True)
class Split:
    """Which characters are for training and which for testing.

    Args:
        by: "sample" tests on other characters of the same writers, "user" on other writers, "given" as the source
            has it; "auto" is "given" if the source has a split, else "sample".
        train_fraction: share to train on: of each writer's characters, or of the writers.
    """

    by: By = "auto"
    train_fraction: float = 0.9

    def __post_init__(self) -> None:
        one_of(self, "by", ("auto", "given", "sample", "user"))
        positive(self, "train_fraction", "It is the share to train on; LEAF's own is 0.9.", upper=1)


@dataclass(frozen=True)
class Pixels:
    """How pixels become numbers in [0, 1].

    Args:
        invert: whether ink is 1 and paper 0, as in MNIST.
        dtype: of the pixels; labels are int64.
    """

    invert: bool = False
    dtype: Literal["float32", "float64"] = "float32"

    def __post_init__(self) -> None:
        one_of(self, "dtype", ("float32", "float64"))


def as_options(kind: type[OptionsT], given: object, argument: str, shorthand: str | None = None) -> OptionsT:
    """Build the options of ``argument`` from a mapping, or from a string that is the value of ``shorthand``."""
    if isinstance(given, kind):
        return given
    values = {shorthand: given} if shorthand is not None and isinstance(given, str) else given
    known = [field.name for field in fields(kind)]  # type: ignore[arg-type]
    if not isinstance(values, Mapping):
        raise TypeError(
            f"FEMNIST.{argument} must be {kind.__name__}(...) or a mapping with some of {', '.join(known)}; got"
            f" {given!r}."
        )
    for name in values:
        if name not in known:
            raise ValueError(f"FEMNIST.{argument} has no option {name!r}. It has {', '.join(known)}.")
    return kind(**values)


def check_moved(given: Mapping[str, Any]) -> None:
    """Refuse former arguments of FEMNIST by name."""
    for name in given:
        if name in MOVED:
            raise TypeError(f"FEMNIST has no argument {name!r} any more. Write {MOVED[name]}.")
