from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.selective import ConvexSet, Patterns, Scope
from lightning_fed.core.validation import positive
from lightning_fed.prox.elementary import onto_l1_ball


@dataclass(frozen=True)
class L1Ball(ConvexSet):
    r"""Constraint :math:`\|x\|_1 \le radius`; its prox shrinks all absolute values by the same amount.

    >>> import torch
    >>> L1Ball(2.0).prox(torch.tensor([3.0, -1.0, 0.5, 0.0, -2.0]), 1.0)
    tensor([ 1.5000, -0.0000,  0.0000,  0.0000, -0.5000])
    """

    radius: float = 1.0
    on: Patterns = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "radius", "It is the largest sum of absolute values that is allowed.")

    def project(self, v: Tensor) -> Tensor:
        return onto_l1_ball(v, self.radius)
