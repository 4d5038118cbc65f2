"""Notes of the content of one object: compare it with the current content, write it back."""

from __future__ import annotations

import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor

#: Immutable values, compared by value.
VALUES = (bool, int, float, complex, str, bytes)


def same(a: Any, b: Any) -> bool:
    """Whether two entries are the same object, or equal values of one type; nan equals nan.

    >>> same((1, float("nan")), (1, float("nan"))), same(1, 1.0), same([], [])
    (True, False, False)
    """
    if a is b:
        return True
    if type(a) is not type(b):
        return False
    if isinstance(a, tuple):
        return len(a) == len(b) and all(map(same, a, b))
    return isinstance(a, VALUES) and (a == b or (a != a and b != b))


def same_numbers(a: Tensor, b: Tensor) -> bool:
    """Whether two tensors have the same shape, type and numbers; nan equals nan.

    >>> same_numbers(torch.tensor([1.0, torch.nan]), torch.tensor([1.0, torch.nan]))
    True
    """
    if a.is_nested or a.is_meta:
        return a is b  # torch.equal cannot compare nested or meta tensors
    if a.shape != b.shape or a.dtype != b.dtype or a.layout != b.layout:
        return False
    if a.layout is not torch.strided:
        a, b = a.to_dense(), b.to_dense()
    return torch.equal(a, b) or bool(((a == b) | ((a != a) & (b != b))).all())


class Note(ABC):
    """The content of one object itself when the note was made."""

    def __init__(self, owner: Any) -> None:
        self.owner = owner

    @abstractmethod
    def changed(self) -> bool:
        """Whether the content of the object differs from the note."""

    @abstractmethod
    def restore(self) -> None:
        """Write the noted content back."""

    def parts(self) -> Iterable[Any]:
        """Objects that the content refers to."""
        return ()


class Entries(Note):
    """The entries of a list or a deque."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.content = list(owner)

    def changed(self) -> bool:
        return len(self.owner) != len(self.content) or not all(map(same, self.owner, self.content))

    def restore(self) -> None:
        self.owner.clear()
        self.owner.extend(self.content)

    def parts(self) -> Iterable[Any]:
        return self.content

    def appended(self) -> list[Any]:
        """Entries after the noted ones, if a list still begins with the noted entries; otherwise none."""
        known = len(self.content)
        if type(self.owner) is not list or len(self.owner) <= known:
            return []
        return self.owner[known:] if all(map(same, self.owner, self.content)) else []


class Items(Note):
    """The items of a dictionary, or the attributes of an object."""

    def __init__(self, owner: Any, items: dict[Any, Any], keeps: Callable[[Any], bool] = lambda key: True) -> None:
        super().__init__(owner)
        self.items, self.keeps = items, keeps
        self.content = {key: value for key, value in items.items() if keeps(key)}

    def changed_keys(self) -> list[Any]:
        now = {key: value for key, value in self.items.items() if self.keeps(key)}
        kept = [key for key, value in self.content.items() if key not in now or not same(now[key], value)]
        return kept + [key for key in now if key not in self.content]

    def changed(self) -> bool:
        return bool(self.changed_keys()) or not all(map(same, self.content, filter(self.keeps, self.items)))

    def restore(self) -> None:
        for key in [key for key in self.items if self.keeps(key)]:
            del self.items[key]
        self.items.update(self.content)

    def parts(self) -> Iterable[Any]:
        return [*self.content, *self.content.values()]


class Names(Note):
    """The keys of a dictionary, without their values."""

    def __init__(self, owner: Any, items: dict[Any, Any]) -> None:
        super().__init__(owner)
        self.items, self.content = items, list(items)

    def changed_keys(self) -> list[Any]:
        return [key for key in self.content if key not in self.items] + [k for k in self.items if k not in self.content]

    def changed(self) -> bool:
        return bool(self.changed_keys())

    def restore(self) -> None:
        for key in [key for key in self.items if key not in self.content]:
            del self.items[key]
        for key in self.content:
            self.items.setdefault(key, None)


class Slots(Note):
    """The attributes of an object that its class keeps in ``__slots__``, or the content of a closure's cell."""

    def __init__(self, owner: Any, names: list[str]) -> None:
        super().__init__(owner)
        self.names = names
        self.content = self._now()

    def _now(self) -> dict[str, Any]:
        found = {}
        for name in self.names:
            with suppress(AttributeError, ValueError):  # an empty slot, an empty cell
                found[name] = getattr(self.owner, name)
        return found

    def changed(self) -> bool:
        now = self._now()
        return now.keys() != self.content.keys() or any(not same(now[name], old) for name, old in self.content.items())

    def restore(self) -> None:
        for name in self._now().keys() - self.content.keys():
            delattr(self.owner, name)
        for name, value in self.content.items():
            object.__setattr__(self.owner, name, value)  # bypasses a frozen dataclass

    def parts(self) -> Iterable[Any]:
        return self.content.values()


class Members(Note):
    """The members of a set."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.content = set(owner)

    def changed(self) -> bool:
        return bool(self.owner != self.content)

    def restore(self) -> None:
        self.owner.clear()
        self.owner.update(self.content)

    def parts(self) -> Iterable[Any]:
        return self.content


class Numbers(Note):
    """The numbers of a tensor."""

    def __init__(self, owner: Tensor) -> None:
        super().__init__(owner)
        self.content = owner.detach().clone()

    def changed(self) -> bool:
        return not same_numbers(self.owner.detach(), self.content)

    @torch.no_grad()
    def restore(self) -> None:
        if self.owner.shape == self.content.shape and self.owner.layout is torch.strided:
            with torch.inference_mode(self.owner.is_inference()):
                self.owner.detach().copy_(self.content)
        else:
            self.owner.data = self.content.clone()


class Array(Note):
    """The entries of a NumPy array, or the bytes of a byte array."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.content = owner.copy()

    def changed(self) -> bool:
        if isinstance(self.owner, bytearray):
            return bool(self.owner != self.content)
        if self.owner.shape != self.content.shape or self.owner.dtype != self.content.dtype:
            return True
        if self.owner.dtype.hasobject:
            return not all(map(same, self.owner.flat, self.content.flat))
        return bool(self.owner.tobytes() != self.content.tobytes())

    def restore(self) -> None:
        self.owner[... if isinstance(self.owner, np.ndarray) else slice(None)] = self.content

    def parts(self) -> Iterable[Any]:
        return self.content.flat if isinstance(self.owner, np.ndarray) and self.owner.dtype.hasobject else ()


class Stream(Note):
    """The state of a random generator."""

    def __init__(self, owner: Any) -> None:
        super().__init__(owner)
        self.content = _get_state(owner)

    def changed(self) -> bool:
        return repr(_get_state(self.owner)) != repr(self.content)

    def restore(self) -> None:
        _set_state(self.owner, self.content)


#: Objects that draw random numbers.
STREAMS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)


#: Global random generators of libraries; every visit seeds them.
GLOBAL_STREAMS = (random._inst, np.random.mtrand._rand, torch.default_generator)


def _get_state(stream: Any) -> Any:
    if isinstance(stream, np.random.Generator):
        return stream.bit_generator.state
    if isinstance(stream, np.random.RandomState):
        return [part.tolist() if isinstance(part, np.ndarray) else part for part in stream.get_state(legacy=True)]
    return stream.getstate() if isinstance(stream, random.Random) else stream.get_state().tolist()


def _set_state(stream: Any, state: Any) -> None:
    if isinstance(stream, np.random.Generator):
        stream.bit_generator.state = state
    elif isinstance(stream, np.random.RandomState):
        stream.set_state(tuple(state))
    elif isinstance(stream, random.Random):
        stream.setstate(state)
    else:
        stream.set_state(torch.tensor(state, dtype=torch.uint8))
