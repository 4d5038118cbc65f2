from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fed.prox.base import Prox, check_parts, needs_layout

if TYPE_CHECKING:
    from lightning_fed.vector import Layout


@dataclass(frozen=True)
class Sum(Prox):
    r""":math:`g(x) = \sum_k g_k(x)`, each :math:`g_k` on parameters of its own; the prox is that of each of them.

    Parts that share parameters are refused: the prox of such a sum is in general not made of theirs.

    >>> import torch
    >>> from lightning_fed.prox import L1, Box
    >>> from lightning_fed.vector import Layout
    >>> g = Sum([L1(1.0, on="weight"), Box(-1, 1, on="bias")]).bind(Layout.of(torch.nn.Linear(2, 1)))
    >>> g.prox(torch.tensor([3.0, -1.5, 5.0]), 1.0)
    tensor([ 2.0000, -0.5000,  1.0000])
    """

    parts: Sequence[Prox]

    #: set by bind, which alone can see that no two parts share a parameter
    _separable = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", check_parts(self, self.parts))

    @property
    def indicator(self) -> bool:
        return all(g.indicator for g in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return sum((g(x) for g in self._bound()), x.new_zeros(x.shape[:-1]))

    def prox(self, v: Tensor, t: float) -> Tensor:
        for g in self._bound():
            v = g.prox(v, t)
        return v

    def bind(self, layout: Layout) -> Sum:
        seen: dict[str, Prox] = {}
        for g in self.parts:
            for name in g.acts_on(layout):
                if name in seen:
                    raise ValueError(
                        f"Sum: {seen[name]!r} and {g!r} both act on {name}, and the prox of their sum is not made of"
                        ' theirs. Give each its own parameters (on="*.weight"), or use ElasticNet, or Intersection.'
                    )
                seen[name] = g
        bound = replace(self, parts=[g.bind(layout) for g in self.parts])
        object.__setattr__(bound, "_separable", True)
        return bound

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        chosen = {name for g in self.parts for name in g.acts_on(layout)}
        return tuple(name for name in layout.names if name in chosen)

    def _bound(self) -> Sequence[Prox]:
        if not self._separable:
            raise needs_layout(self)
        return self.parts
