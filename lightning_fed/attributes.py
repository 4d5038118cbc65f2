"""What a module's own code does to its attributes, noticed and undone."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

#: a module's parameters, buffers, parts and hooks
_BOOKKEEPING = frozenset(vars(nn.Module()))

#: what Lightning notes in a module
_LIGHTNINGS_OWN = frozenset({"_current_fx_name", "_param_requires_grad_state", "_metric_attributes"})

#: every attribute with a copy of what it holds, where that could be changed in place
Attributes = dict[str, tuple[Any, Any]]


def remember(module: nn.Module) -> Attributes:
    """Every attribute, and a copy of what it holds where that could be changed in place."""
    return {key: (value, _copy(value)) for key, value in vars(module).items() if key not in _BOOKKEEPING}


def _copy(value: Any) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    return value.copy() if type(value) in (list, dict, set) else None


def restore(module: nn.Module, remembered: Attributes) -> None:
    for key in vars(module).keys() - remembered.keys() - _BOOKKEEPING:
        del vars(module)[key]
    for key, (value, copy) in remembered.items():
        vars(module)[key] = value
        if isinstance(value, Tensor) and not torch.equal(value, copy):
            with torch.no_grad():
                value.copy_(copy)
        elif isinstance(value, list) and copy is not None:
            value[:] = copy
        elif isinstance(value, dict | set) and copy is not None:
            value.clear()
            value.update(copy)


def changed(module: nn.Module, remembered: Attributes) -> str | None:
    """The name of an attribute that is not what it was; None if all are. Lightning's own books do not count."""
    for key, (value, copy) in remembered.items():
        same = vars(module).get(key) is value and (copy is None or _same(value, copy))
        if not same and key not in _LIGHTNINGS_OWN:
            return key
    return min(vars(module).keys() - remembered.keys() - _BOOKKEEPING - _LIGHTNINGS_OWN, default=None)


def _same(value: Any, copy: Any) -> bool:
    return torch.equal(value, copy) if isinstance(value, Tensor) else bool(value == copy)
