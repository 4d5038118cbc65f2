"""The interface of every ``g``: its value and its prox."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fed.core.validation import is_number, shown

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


class Prox(ABC):
    r"""A convex :math:`g` with :math:`\mathrm{prox}_{tg}(v) = \arg\min_x g(x) + \frac1{2t}\|x - v\|^2`.

    Arguments are flat vectors (any leading dimensions are separate vectors); neither is modified.

    A new ``g`` defines its value and its prox; algorithms, checks and logs need no more:

    >>> class Cube(Prox):  # the largest entry in absolute value is at most 1
    ...     indicator = True
    ...
    ...     def __call__(self, x):
    ...         return outside(x, self.prox(x, 1.0))
    ...
    ...     def prox(self, v, t):
    ...         return v.clamp(-1, 1)
    >>> g = Cube()
    >>> g.prox(torch.tensor([0.5, -3.0]), 1.0)
    tensor([ 0.5000, -1.0000])
    >>> float(g(torch.tensor([0.5, -3.0])))
    inf
    """

    @property
    def indicator(self) -> bool:
        """True for the indicator of a set: its prox is a projection and does not depend on ``t``."""
        return False

    @property
    def constrained(self) -> bool:
        """Whether ``g`` is infinite somewhere: it is an indicator or contains one."""
        return self.indicator

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """:math:`g(x)`; ``inf`` outside the set of an indicator."""

    @abstractmethod
    def prox(self, v: Tensor, t: float) -> Tensor:
        """The minimiser of :math:`g(x) + |x - v|^2 / (2t)`; for ``t = 0`` the nearest point where ``g`` is finite."""

    def finite(self, x: Tensor) -> Tensor:
        """:math:`g(x)` without its indicators: finite everywhere, so that it can be logged."""
        return x.new_zeros(x.shape[:-1]) if self.indicator else self(x)

    def bind(self, layout: Layout) -> Prox:
        """Return the same ``g`` (equal, with the same repr), bound to where parameters lie in the flat vector."""
        return self

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        """Names of the parameters that ``g`` depends on."""
        return layout.names


@dataclass(frozen=True, eq=False)
class WithTensors:
    """Mixin: equality and hash, by value, of a dataclass with tensor fields."""

    def __eq__(self, other: object) -> bool:
        return type(other) is type(self) and isinstance(other, WithTensors) and self._plain() == other._plain()

    def __hash__(self) -> int:
        return hash(self._plain())

    def _plain(self) -> tuple[object, ...]:
        values = [getattr(self, field.name) for field in fields(self)]
        return tuple((v.shape, *v.flatten().tolist()) if isinstance(v, Tensor) else v for v in values)


def float64(value: Tensor | Sequence[Sequence[float]] | Sequence[float] | float) -> Tensor:
    """Copy ``value`` to a float64 tensor on the CPU, so that decimal numbers keep their digits."""
    return torch.as_tensor(value, dtype=torch.float64, device="cpu").detach().clone()


def length(x: Tensor, keepdim: bool = False) -> Tensor:
    """The Euclidean norm."""
    norm: Tensor = x.norm(dim=-1, keepdim=keepdim)
    return norm


def outside(x: Tensor, nearest: Tensor) -> Tensor:
    """0 where ``x`` is the nearest point of the set, up to rounding; else (also for NaN) ``inf``."""
    eps = torch.finfo(x.dtype).eps
    inside = length(x - nearest) <= math.sqrt(eps) * length(x) + 10 * eps
    return torch.where(inside, 0.0, float("inf")).to(x.dtype)


def needs_layout(g: Prox) -> ValueError:
    name = type(g).__name__
    return ValueError(
        f"{name} needs the module's parameters, their names and shapes, to select those it acts on. It is bound by"
        " FederatedServer; in simulate use bind(...) yourself: g.bind(Layout.of(module)), Layout from"
        " lightning_fed.core.layout."
    )


def check_strength(g: object, c: float, name: str = "c") -> None:
    """Refuse a strength that would make ``g`` concave or undefined."""
    if not is_number(c) or not 0 <= c < float("inf"):
        raise ValueError(
            f"{type(g).__name__}.{name} must be a finite number >= 0, got {shown(c)}. It is the strength of g."
        )


def check_parts(g: object, parts: Sequence[Prox]) -> tuple[Prox, ...]:
    """Return the parts of a composite ``g`` as a tuple; refuse a part that is not a Prox."""
    if not isinstance(parts, Sequence) or not parts or not all(isinstance(part, Prox) for part in parts):
        raise TypeError(f"{type(g).__name__} is made of one Prox or more, such as L1(1e-4), got {parts!r}.")
    return tuple(parts)
