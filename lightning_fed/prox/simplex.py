from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.selective import ConvexSet, Patterns, Scope
from lightning_fed.core.validation import positive
from lightning_fed.prox.elementary import onto_simplex


@dataclass(frozen=True)
class Simplex(ConvexSet):
    r"""Constraint :math:`x_j \ge 0`, :math:`\sum_j x_j = total`.

    >>> import torch
    >>> Simplex(1.0).prox(torch.tensor([0.75, 0.5, -1.0]), 1.0)
    tensor([0.6250, 0.3750, 0.0000])
    """

    total: float = 1.0
    on: Patterns = None
    scope: Scope = "global"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "total", "It is what the entries sum to.")

    def project(self, v: Tensor) -> Tensor:
        return onto_simplex(v, self.total)
