"""What a module's own code does to its attributes, noticed and undone."""

from __future__ import annotations

import random
from collections import deque
from collections.abc import Hashable, Mapping
from copy import deepcopy
from types import ModuleType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric

#: a module's parameters, buffers, parts and hooks
_BOOKKEEPING = frozenset(vars(nn.Module()))

#: what Lightning notes in a module
_LIGHTNINGS_OWN = frozenset({"_current_fx_name", "_param_requires_grad_state", "_metric_attributes"})

#: whose insides are none of the module's settings
_OTHERS = (type, ModuleType, nn.Module, pl.Trainer, pl.Callback, pl.LightningDataModule, Dataset)

#: containers with more entries are data, not settings: only their size is looked at
_FEW = 100

#: bytes of an array
_SMALL = 2**16

#: what draws random numbers
_STREAMS = (np.random.Generator, np.random.RandomState, torch.Generator, random.Random)

#: every attribute with a copy of what it holds, where that could be changed in place, and its picture
Attributes = dict[str, tuple[Any, Any, Hashable]]


def remember(module: nn.Module) -> Attributes:
    """Every attribute, and a copy of what it holds where that could be changed in place."""
    kept = {key: value for key, value in vars(module).items() if key not in _BOOKKEEPING}
    return {key: (value, _copy(value), picture(value)) for key, value in kept.items()}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | dict | set | deque) or _is_small(value):
        return value.copy()
    if isinstance(value, _STREAMS):
        return deepcopy(_state(value))
    return dict(vars(value)) if hasattr(value, "__dict__") and not isinstance(value, _OTHERS) else None


def picture(value: Any, depth: int = 4) -> Hashable:
    """Something that is equal as long as a value is: numbers and texts by what they are, objects by what they hold.

    >>> settings = {"losses": [0.5, {"alpha": 1}]}
    >>> before = picture(settings)
    >>> settings["losses"][1]["alpha"] = 2
    >>> picture(settings) == before
    False
    """
    if value is None or isinstance(value, bool | int | float | complex | str | bytes):
        return value if value == value else "nan"
    if isinstance(value, Tensor):  # parameters move with every step
        return id(value), None if isinstance(value, nn.Parameter) or value.is_inference() else value._version
    if isinstance(value, _STREAMS):
        return id(value), str(_state(value))
    if isinstance(value, Metric):  # one that is kept in a list, where no copy of the module finds it
        return id(value), value._update_count
    if _is_small(value):
        return id(value), value.shape, value.tobytes()
    if depth == 0 or isinstance(value, _OTHERS):
        return id(value)
    if isinstance(value, Mapping | list | tuple | set | frozenset | deque):
        if len(value) > _FEW:
            return id(value), len(value)
        entries = value.items() if isinstance(value, Mapping) else value
        parts = [picture(entry, depth if isinstance(value, Mapping) else depth - 1) for entry in entries]
        return type(value), frozenset(parts) if isinstance(value, set | frozenset) else tuple(parts)
    inside = vars(value) if hasattr(value, "__dict__") else {}
    return id(value), picture(inside, depth - 1) if inside else None


def _is_small(value: Any) -> bool:
    """Larger arrays are data, not settings."""
    return isinstance(value, np.ndarray) and value.nbytes <= _SMALL and not value.dtype.hasobject


def _state(stream: Any) -> Any:
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


def draws_of(data: Any, client: Hashable) -> list[str]:
    """The states of the random generators of a client's data set, its transforms and its datamodule."""
    waiting, seen, found = [data, data.client_dataset(client)], set[int](), list[str]()
    while waiting:
        part = waiting.pop()
        if id(part) in seen or isinstance(part, Tensor | np.ndarray | nn.Module | pl.Trainer | type | ModuleType):
            continue
        seen.add(id(part))
        if isinstance(part, _STREAMS):
            found.append(str(_state(part)))
        elif isinstance(part, Mapping | list | tuple) and len(part) <= _FEW:
            waiting.extend(part.values() if isinstance(part, Mapping) else part)
        elif hasattr(part, "__dict__"):
            of_its_class = (value for kind in type(part).__mro__ for value in vars(kind).values())
            waiting.extend([*vars(part).values(), *(value for value in of_its_class if isinstance(value, _STREAMS))])
    return found


def settings_of(module: nn.Module) -> Hashable:
    """A picture of the attributes of a module and its parts, which recorded steps freeze."""
    return tuple(
        (key, picture(value))
        for part in module.modules()
        if not isinstance(part, Metric)
        for key, value in vars(part).items()
        if key == "training" or key not in _BOOKKEEPING | _LIGHTNINGS_OWN
    )


def restore(module: nn.Module, remembered: Attributes) -> None:
    for key in vars(module).keys() - remembered.keys() - _BOOKKEEPING:
        del vars(module)[key]
    for key, (value, copy, before) in remembered.items():
        vars(module)[key] = value
        if isinstance(value, _STREAMS):
            _set_state(value, copy)
        elif _is_small(value):
            value[...] = copy
        elif isinstance(value, Tensor) and not torch.equal(value, copy):
            with torch.no_grad():
                value.copy_(copy)
        elif isinstance(value, list | deque):
            value.clear()
            value.extend(copy)
        elif isinstance(value, dict | set):
            value.clear()
            value.update(copy)
        elif copy is not None and not isinstance(value, Tensor) and picture(value) != before:
            value.__dict__.clear()
            value.__dict__.update(copy)


def changed(module: nn.Module, remembered: Attributes) -> str | None:
    """The name of an attribute that is not what it was; None if all are. Lightning's own books do not count."""
    for key, (value, copy, before) in remembered.items():
        now = vars(module).get(key)
        same = torch.equal(value, copy) if isinstance(value, Tensor) else picture(now) == before
        if (now is not value or not same) and key not in _LIGHTNINGS_OWN:
            return key
    return min(vars(module).keys() - remembered.keys() - _BOOKKEEPING - _LIGHTNINGS_OWN, default=None)
