"""Module <-> flat vector, by parameter name."""

from __future__ import annotations

import math
from collections.abc import Container, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.nn.parameter import UninitializedParameter
from torch.utils import _pytree as pytree

from lightning_fed.core.summation import TreeSum

T = TypeVar("T")


@dataclass(frozen=True)
class Layout:
    """Where each trainable parameter lies in the flat vector ``x``.

    ``x`` is the concatenation, in ``named_parameters()`` order, of the parameters with ``requires_grad``, without
    frozen and personal parameters and buffers. The precision of ``x`` is that of the parameters, but at least float32.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    dtype: torch.dtype

    @classmethod
    def of(cls, module: nn.Module, personal: Container[str] = ()) -> Layout:
        """The layout of a module's trainable parameters but those named by ``personal``."""
        params = {name: p for name, p in module.named_parameters() if p.requires_grad}
        lazy = [name for name, p in params.items() if isinstance(p, UninitializedParameter)]
        if lazy:
            raise ValueError(f"{_name(module)}.{lazy[0]} has no shape yet. Run one forward pass before the fit.")
        params = {name: p for name, p in params.items() if name not in personal}
        if not params:
            besides = " besides its personal ones" if personal else ""
            raise ValueError(
                f"{_name(module)} has no trainable parameters{besides}, so there is nothing to federate."
                " Give it parameters with requires_grad=True."
            )
        whole = [name for name, p in params.items() if not p.is_floating_point()]
        if whole:
            raise ValueError(f"{_name(module)}.{whole[0]} is not real floating point, which the algorithms need.")
        return cls.select({name: (tuple(p.shape), p.dtype) for name, p in params.items()}, params)

    @classmethod
    def select(cls, parameters: Mapping[str, tuple[tuple[int, ...], torch.dtype]], names: Iterable[str]) -> Layout:
        """Build the layout of ``names``, in that order, from the shapes and precisions of all parameters."""
        chosen = {name: parameters[name] for name in names}
        dtype = reduce(torch.promote_types, (dtype for _, dtype in chosen.values()), torch.float32)
        return cls(tuple(chosen), tuple(shape for shape, _ in chosen.values()), dtype)

    @property
    def numel(self) -> int:
        return sum(math.prod(shape) for shape in self.shapes)

    def flatten(self, tensors: Mapping[str, Tensor]) -> Tensor:
        """The flat vector of the named tensors; a copy."""
        return torch.cat([tensors[name].detach().reshape(-1).to(self.dtype) for name in self.names])

    def split(self, x: Tensor) -> dict[str, Tensor]:
        """Views of ``x`` in the parameters' shapes, by name."""
        parts = torch.split(x, [math.prod(shape) for shape in self.shapes])
        return {name: part.view(shape) for name, shape, part in zip(self.names, self.shapes, parts, strict=True)}

    def transplant(self, old: Layout, state: T, fresh: T, between: Iterable[Layout] = ()) -> T:
        """Copy ``state``, a record in layout ``old``, into ``fresh``, a record in this layout; returns a new record.

        A parameter that was frozen in a layout ``between`` the two keeps its value of ``fresh``.
        """
        lasting = set(self.names).intersection(old.names, *(layout.names for layout in between))

        def move(known: Tensor, blank: Tensor) -> Tensor:
            if known.shape != (old.numel,):
                return known  # a counter, not a vector of parameters
            merged = blank.clone()
            source, target = old.split(known), self.split(merged)
            for name in lasting:
                target[name].copy_(source[name])
            return merged

        grown: T = pytree.tree_map(move, state, fresh)
        return grown


def parameters_of(module: nn.Module) -> dict[str, Tensor]:
    """All parameters by name, frozen ones included; no copies."""
    return {name: p.detach() for name, p in module.named_parameters()}


def buffers_of(module: nn.Module) -> dict[str, Tensor]:
    """All buffers by name, aliases included; no copies."""
    return {name: b.detach() for name, b in module.named_buffers(remove_duplicate=False)}


def is_finite(x: Tensor) -> bool:
    """Whether all entries of ``x`` are finite; tests the sum first, because a finite sum proves it in one pass.

    >>> [is_finite(torch.tensor(x)) for x in ([3e38, 3e38], [1.0, float("inf")], [float("nan"), 1.0])]
    [True, False, False]
    """
    return bool(torch.isfinite(x.sum())) or bool(torch.isfinite(x).all())


def clones(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: t.detach().clone() for name, t in tensors.items()}


@torch.no_grad()
def overwrite(targets: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
    """Copy ``values`` into the tensors of the same name."""
    for name, value in values.items():
        targets[name].copy_(value)


@torch.no_grad()
def restore_buffers(module: nn.Module, values: Mapping[str, Tensor]) -> None:
    """Set the module's buffers to ``values``; a buffer not in ``values`` did not exist then and becomes None."""
    for prefix, owner in module.named_modules(remove_duplicate=False):
        for key, buffer in owner._buffers.items():
            value = values.get(f"{prefix}.{key}" if prefix else key)
            if value is not None and buffer is not None and buffer.shape == value.shape:
                buffer.copy_(value)
            elif value is not None or buffer is not None:
                owner._buffers[key] = None if value is None else value.detach().clone()


def average_buffers(weighted: Iterable[tuple[float, Mapping[str, Tensor]]]) -> dict[str, Tensor]:
    """Weighted mean of the clients' buffers; integer and boolean buffers are counters, so take their maximum."""
    pairs = list(weighted)
    total = sum(weight for weight, _ in pairs)
    merged = {}
    for name, first in pairs[0][1].items():
        if any(name not in buffers or buffers[name].shape != first.shape for _, buffers in pairs):
            continue  # only some clients have this buffer, or its shape differs between clients
        if first.is_floating_point():
            mean = TreeSum()
            for weight, buffers in pairs:
                mean.add(buffers[name].unsqueeze(0), [weight / total])
            merged[name] = mean.value().to(first)
        else:
            merged[name] = reduce(torch.maximum, (buffers[name] for _, buffers in pairs))
    return merged


def _name(module: nn.Module) -> str:
    return type(module).__name__
