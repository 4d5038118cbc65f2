from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fed.core.prox import Prox, WithTensors, check_parts, float64, outside

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


@dataclass(frozen=True, eq=False)
class Translated(WithTensors, Prox):
    r""":math:`h(x) = g(x - shift)`, whose prox is :math:`shift + \mathrm{prox}_{tg}(v - shift)`.

    ``shift`` is a number or a flat vector, such as a known model: ``Layout.of(model).flatten(dict(...))``.

    >>> from lightning_fed.prox import L2Ball
    >>> Translated(L2Ball(1.0), [1.0, 0.0]).prox(torch.tensor([4.0, 4.0]), 1.0)
    tensor([1.6000, 0.8000])
    """

    g: Prox
    shift: Tensor | Sequence[float] | float

    def __post_init__(self) -> None:
        check_parts(self, [self.g])
        shift = float64(self.shift)
        if shift.ndim > 1 or not shift.isfinite().all():
            raise ValueError(f"Translated.shift must be a finite number or flat vector, got {self.shift!r}.")
        object.__setattr__(self, "shift", shift)

    @property
    def indicator(self) -> bool:
        return self.g.indicator

    @property
    def constrained(self) -> bool:
        return self.g.constrained

    def __call__(self, x: Tensor) -> Tensor:
        if not self.constrained:
            return self.g(x - self._like(x))
        return self.finite(x) + outside(x, self.prox(x, 0.0))  # x - shift may leave the set by rounding alone

    def finite(self, x: Tensor) -> Tensor:
        return self.g.finite(x - self._like(x))

    def prox(self, v: Tensor, t: float) -> Tensor:
        shift = self._like(v)
        u = v - shift
        p = self.g.prox(u, t)
        return torch.where(p == u, v, shift + p)  # entries that g leaves unchanged are not rounded

    def bind(self, layout: Layout) -> Translated:
        return replace(self, g=self.g.bind(layout))

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        return self.g.acts_on(layout)

    def _like(self, x: Tensor) -> Tensor:
        shift = torch.as_tensor(self.shift).to(x)
        if shift.ndim and shift.shape[-1] != x.shape[-1]:
            raise ValueError(f"Translated.shift has {shift.shape[-1]} entries, but x has {x.shape[-1]}.")
        return shift
