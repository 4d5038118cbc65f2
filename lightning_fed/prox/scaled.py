from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from torch import Tensor

from lightning_fed.core.prox import Prox, check_parts
from lightning_fed.core.validation import positive

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


@dataclass(frozen=True)
class Scaled(Prox):
    r""":math:`a\,g(x)`, whose prox with step :math:`t` is that of :math:`g` with step :math:`ta`.

    >>> import torch
    >>> from lightning_fed.prox import L1
    >>> Scaled(L1(1.0), 0.5).prox(torch.tensor([3.0, -1.0]), 1.0)
    tensor([ 2.5000, -0.5000])
    """

    g: Prox
    a: float = 1.0

    def __post_init__(self) -> None:
        check_parts(self, [self.g])
        positive(self, "a", "It multiplies g; for none of g use Zero().")

    @property
    def indicator(self) -> bool:
        return self.g.indicator

    @property
    def constrained(self) -> bool:
        return self.g.constrained

    def __call__(self, x: Tensor) -> Tensor:
        return self.a * self.g(x)

    def finite(self, x: Tensor) -> Tensor:
        return self.a * self.g.finite(x)

    def prox(self, v: Tensor, t: float) -> Tensor:
        return self.g.prox(v, t * self.a)

    def bind(self, layout: Layout) -> Scaled:
        return replace(self, g=self.g.bind(layout))

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        return self.g.acts_on(layout)
