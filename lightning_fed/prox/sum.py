from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fed.core.prox import Prox, check_parts, needs_layout
from lightning_fed.core.selective import Selective
from lightning_fed.prox.box import Box
from lightning_fed.prox.elastic_net import ElasticNet
from lightning_fed.prox.l1 import L1
from lightning_fed.prox.non_negative import NonNegative
from lightning_fed.prox.squared_l2 import SquaredL2

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout

#: Regularisers that are sums over entries, and constraints that are intervals for every entry.
ENTRYWISE, INTERVALS = (L1, SquaredL2, ElasticNet), (Box, NonNegative)


@dataclass(frozen=True)
class Sum(Prox):
    r""":math:`g(x) = \sum_k g_k(x)`, each :math:`g_k` on its own parameters; the prox applies the prox of each part.

    Parts that share parameters are refused, because the prox of their sum is in general not composed of theirs. The
    exception is one of ``L1``, ``SquaredL2``, ``ElasticNet`` with one of ``Box``, ``NonNegative``: the minimum of a
    convex function of one entry over an interval is the point of the interval nearest to the free minimum, so that
    the prox of the interval is applied after the other.

    >>> import torch
    >>> from lightning_fed.core.layout import Layout
    >>> g = Sum([L1(1.0, on="weight"), Box(-1, 1, on="bias")]).bind(Layout.of(torch.nn.Linear(2, 1)))
    >>> g.prox(torch.tensor([3.0, -1.5, 5.0]), 1.0)
    tensor([ 2.0000, -0.5000,  1.0000])
    >>> Sum([NonNegative(), L1(1.0)]).prox(torch.tensor([3.0, -1.5, 0.5]), 1.0)
    tensor([2., 0., 0.])
    """

    parts: Sequence[Prox]

    #: Set by bind, which knows which parts share a parameter.
    _checked = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", check_parts(self, self.parts))

    @property
    def indicator(self) -> bool:
        return all(g.indicator for g in self.parts)

    @property
    def constrained(self) -> bool:
        return any(g.constrained for g in self.parts)

    def __call__(self, x: Tensor) -> Tensor:
        return sum((g(x) for g in self._in_turn()), x.new_zeros(x.shape[:-1]))

    def finite(self, x: Tensor) -> Tensor:
        return sum((g.finite(x) for g in self._in_turn()), x.new_zeros(x.shape[:-1]))

    def prox(self, v: Tensor, t: float) -> Tensor:
        for g in self._in_turn():
            v = g.prox(v, t)
        return v

    def bind(self, layout: Layout) -> Sum:
        names = [g.acts_on(layout) for g in self.parts]
        for name in layout.names:
            _check_shared([g for g, its in zip(self.parts, names, strict=True) if name in its], name)
        bound = replace(self, parts=[g.bind(layout) for g in self.parts])
        object.__setattr__(bound, "_checked", True)
        return bound

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        chosen = {name for g in self.parts for name in g.acts_on(layout)}
        return tuple(name for name in layout.names if name in chosen)

    def _in_turn(self) -> Sequence[Prox]:
        """The parts, intervals last."""
        if not self._checked:
            if not all(isinstance(g, Selective) and g.whole for g in self.parts):
                raise needs_layout(self)
            _check_shared(self.parts, "all parameters")
        return sorted(self.parts, key=lambda g: isinstance(g, INTERVALS))


def _check_shared(parts: Sequence[Prox], what: str) -> None:
    """Refuse parts that act on the same entries, except one of each kind."""
    for g, h in combinations(parts, 2):
        if not any(isinstance(a, ENTRYWISE) and isinstance(b, INTERVALS) for a, b in ((g, h), (h, g))):
            raise ValueError(
                f"Sum: {g!r} and {h!r} both act on {what}, and the prox of their sum is not composed of theirs, except"
                " for one of L1, SquaredL2, ElasticNet with one of Box, NonNegative. Give each its own parameters"
                ' (on="*.weight"), or use ElasticNet, or Intersection.'
            )
