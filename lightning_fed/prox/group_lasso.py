from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_fed.core.prox import check_strength
from lightning_fed.core.selective import Patterns, Selective
from lightning_fed.core.validation import one_of
from lightning_fed.prox.elementary import length, shorten


@dataclass(frozen=True)
class GroupLasso(Selective):
    r""":math:`g(x) = c\sum_G \omega_G\|x_G\|_2`: whole groups become 0. Its prox is that of `L2` in every group.

    Args:
        c: strength.
        on: names of the parameters that it applies to.
        by: a group is a ``tensor``, or the entries of a tensor that belong to one index of its first dimension:
            a ``row`` of a linear layer, a ``filter`` of a convolution, one entry of a bias. The last two are the same.
        weight: :math:`\omega_G` is the square root of the group's size (``sqrt_size``), or ``one``.

    >>> import torch
    >>> from lightning_fed.core.layout import Layout
    >>> g = GroupLasso(1.0, by="row", weight="one").bind(Layout.of(torch.nn.Linear(2, 2, bias=False)))
    >>> g.prox(torch.tensor([3.0, 4.0, 0.3, 0.4]), 1.0)
    tensor([2.4000, 3.2000, 0.0000, 0.0000])
    """

    c: float = 1.0
    on: Patterns = None
    by: Literal["tensor", "row", "filter"] = "tensor"
    weight: Literal["sqrt_size", "one"] = "sqrt_size"
    scope = "per_tensor"

    def __post_init__(self) -> None:
        super().__post_init__()
        check_strength(self, self.c)
        one_of(self, "by", ("tensor", "row", "filter"))
        one_of(self, "weight", ("sqrt_size", "one"))

    def view(self, name: str, shape: tuple[int, ...]) -> tuple[int, ...]:
        groups = shape[0] if shape and self.by != "tensor" else 1
        return groups, math.prod(shape) // groups

    def value(self, x: Tensor) -> Tensor:
        return self._strength(x) * length(x).sum(-1)

    def shrink(self, v: Tensor, t: float) -> Tensor:
        return shorten(v, t * self._strength(v))

    def _strength(self, x: Tensor) -> float:
        return self.c * (math.sqrt(x.shape[-1]) if self.weight == "sqrt_size" else 1.0)
