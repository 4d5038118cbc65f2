from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.selective import ConvexSet, Patterns, Scope
from lightning_fed.core.validation import positive
from lightning_fed.prox.elementary import length


@dataclass(frozen=True)
class L2Ball(ConvexSet):
    r"""Constraint :math:`\|x\|_2 \le radius`; its prox scales longer vectors down.

    >>> import torch
    >>> L2Ball(1.0).prox(torch.tensor([3.0, 4.0]), 1.0)
    tensor([0.6000, 0.8000])
    """

    radius: float = 1.0
    on: Patterns = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "radius", "It is the largest norm that is allowed.")

    def project(self, v: Tensor) -> Tensor:
        return v * (self.radius / length(v, keepdim=True)).clamp(max=1)
