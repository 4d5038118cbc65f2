"""Record the content of plain Python objects, and restore it into the same objects.

A walk over everything reachable from some attributes notes the content of each mutable object itself: the entries of a
container, the attributes of an object, the numbers of a tensor or an array, the state of a random generator. Writing
these contents back restores every object. Unlike a deep copy this keeps identities, so callbacks and closures that
hold the same objects see them restored too.
"""

from __future__ import annotations

import logging
import pickle
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from enum import Enum
from functools import partial
from pathlib import PurePath
from types import BuiltinMethodType, CellType, FunctionType, MethodType, ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_fed.trainer.notes import (
    GLOBAL_STREAMS,
    STREAMS,
    VALUES,
    Array,
    Entries,
    Items,
    Members,
    Note,
    Numbers,
    Slots,
    Stream,
)

#: Immutable objects, and objects that the whole process shares.
FIXED = (
    *VALUES,
    *(type(None), type, range, slice, ModuleType, weakref.ref, Enum, PurePath, logging.Logger),
    *(torch.dtype, torch.device, np.generic, np.dtype),
)
#: Attributes that only speed up reading (omegaconf).
CACHES = frozenset({"_flags_cache"})


class NotCopyableError(Exception):
    """An object can neither be copied nor inspected, such as a lock, an open file or a running generator."""


class Memento:
    """The content of everything reachable from some objects.

    Args:
        is_outside: whether an object is not inspected.
    """

    def __init__(self, is_outside: Callable[[Any], bool] = lambda value: False) -> None:
        self.is_outside = is_outside
        self.notes: list[Note] = []
        self._seen: dict[int, Any] = {}  # keeps objects alive, because ids of dead objects are reused

    def add(self, *roots: Any) -> list[Note]:
        """Note the content of the roots; return the new notes. On :class:`NotCopyableError` it has added nothing."""
        waiting, notes, seen = list(roots), list[Note](), dict[int, Any]()
        while waiting:
            value = waiting.pop()
            if isinstance(value, FIXED) or id(value) in self._seen or id(value) in seen or self.is_outside(value):
                continue
            seen[id(value)] = value
            for note in _notes(value):
                notes.append(note)
                waiting.extend(note.parts())
            waiting.extend(_held(value))
        self._seen |= seen
        self.notes += notes
        return notes

    def restore(self) -> None:
        for note in self.notes:
            if note.changed():
                note.restore()


def _is_torchs(value: Any) -> bool:
    """Whether a function or an object is internal to torch: compiled code, scripts."""
    name = value.__module__ if isinstance(value, FunctionType) else type(value).__module__
    return str(name).startswith(("torch._", "torch.jit", "torch.fx"))


#: Immutable objects that refer to objects that may be mutable.
_TRANSPARENT = (tuple, frozenset, MethodType, BuiltinMethodType, FunctionType, partial)


def _held(value: Any) -> Iterable[Any]:
    """Objects that an immutable object refers to."""
    if isinstance(value, tuple | frozenset):
        return value
    if isinstance(value, MethodType):
        return [value.__self__, value.__func__]
    if isinstance(value, BuiltinMethodType):
        return [value.__self__]
    if isinstance(value, partial):
        return [value.func, *value.args, *value.keywords.values()]
    if isinstance(value, FunctionType) and not _is_torchs(value):
        return [*(value.__closure__ or ()), value.__defaults__, value.__kwdefaults__]
    return ()


def _notes(value: Any) -> Iterator[Note]:
    """Notes of the content of one object itself; none if it is immutable."""
    kind = type(value)
    if isinstance(value, STREAMS):
        if not any(value is stream for stream in GLOBAL_STREAMS):
            yield Stream(value)
    elif isinstance(value, Tensor):
        if value.is_nested or value.is_meta:
            raise NotCopyableError("a nested or meta tensor does not show its content")
        yield Numbers(value)
        yield Items(value, vars(value))
    elif isinstance(value, np.ndarray | bytearray):
        yield Array(value)
    elif isinstance(value, CellType):
        yield Slots(value, ["cell_contents"])
    else:
        if isinstance(value, list | deque):
            yield Entries(value)
        elif isinstance(value, dict):
            yield Items(value, value)
        elif isinstance(value, set):
            yield Members(value)
        elif not isinstance(value, _TRANSPARENT) and _is_fixed(value):
            return
        if isinstance(attributes := getattr(value, "__dict__", None), dict):
            yield Items(value, attributes, lambda key: key not in CACHES)
        if names := [name for base in kind.__mro__ for name in _slots(base)]:
            yield Slots(value, names)


def _slots(kind: type) -> list[str]:
    names = vars(kind).get("__slots__", ())
    own = [names] if isinstance(names, str) else list(names)
    mangled = [f"_{kind.__name__.lstrip('_')}{n}" if n.startswith("__") and not n.endswith("__") else n for n in own]
    return [name for name in mangled if name not in ("__dict__", "__weakref__")]


#: Methods by which a class defines how its objects are copied.
_COPYING = ("__reduce_ex__", "__reduce__", "__getstate__")
#: CPython's flag (Py_TPFLAGS_HEAPTYPE) of classes that may be written in Python.
_HEAP_TYPE = 1 << 9
#: Classes written in C whose objects have no content besides their attributes.
_SHOWN = (SimpleNamespace, BaseException)


def _is_fixed(value: Any) -> bool:
    """Whether an object is immutable. Raises for a mutable object that does not show its content."""
    kind = type(value)
    if _is_torchs(value):
        return True
    visible = hasattr(value, "__dict__") or any(_slots(base) for base in kind.__mro__)
    copying = [getattr(kind, name) for name in _COPYING if getattr(kind, name, None) is not getattr(object, name, None)]
    in_python = all(base.__flags__ & _HEAP_TYPE for base in kind.__mro__[:-1])
    if visible and (isinstance(value, _SHOWN) or (in_python and all(isinstance(m, FunctionType) for m in copying))):
        return False
    by_identity: tuple[Any, ...] = (None, object.__hash__)
    if not visible and kind.__hash__ not in by_identity:
        return True  # hashed by value, as dates and patterns are, hence immutable
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # copying iterators is deprecated
            reduced = value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)
    except Exception as error:  # __reduce_ex__ of uncopyable objects raises many types of errors
        raise NotCopyableError(f"{kind.__name__}: {error}") from error
    if isinstance(reduced, str):
        return True  # a global object, which pickle stores by name
    if kind is object:
        return True
    raise NotCopyableError(f"{kind.__name__} does not show its content")
