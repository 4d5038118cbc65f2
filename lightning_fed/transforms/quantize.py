from __future__ import annotations

import copy
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor
from typing_extensions import Self

from lightning_fed.core.validation import one_of, whole
from lightning_fed.transforms.base import Sent, Transform

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout

NORM_BITS = 32


@dataclass(frozen=True)
class Quantize(Transform):
    r"""Unbiased stochastic quantisation: send the norm, and for every entry a sign and one of ``levels`` + 1 levels.

    .. math::
        Q(v)_j = \|v\|\,\mathrm{sign}(v_j)\,\xi_j, \quad
        \xi_j = \begin{cases}(l+1)/s & \text{with probability } a - l\\ l/s & \text{else}\end{cases}, \quad
        a = s|v_j|/\|v\|,\; l = \lfloor a\rfloor

    :math:`E\,Q(v) = v` and :math:`E\|Q(v) - v\|^2 \le \min(d/s^2, \sqrt d/s)\|v\|^2`.

    Args:
        levels: s, the number of levels above 0 of every entry.
        per: one norm for the whole ``vector``, or one for every parameter ``tensor``, which is finer for small tensors.

    >>> Quantize(4)(torch.tensor([3.0, 0.0, -4.0]), torch.Generator().manual_seed(0)).bits
    44

    Reference: arXiv:1610.02132.
    """

    levels: int = 16
    per: Literal["vector", "tensor"] = "vector"

    #: number of entries of every tensor, set by bind
    _sizes: ClassVar[tuple[int, ...] | None] = None

    def __post_init__(self) -> None:
        whole(self, "levels", 1)
        one_of(self, "per", ("vector", "tensor"))

    def bind(self, layout: Layout) -> Self:
        bound = copy.copy(self)
        object.__setattr__(bound, "_sizes", tuple(filter(None, map(math.prod, layout.shapes))))
        return bound

    def noise(self, d: int) -> float:
        r"""The factor :math:`\min(d/s^2, \sqrt d/s)` of the bound, for the largest block that shares a norm.

        >>> round(Quantize(levels=16).noise(2282), 2), Quantize(levels=64).noise(2282) < 1
        (2.99, True)
        """
        largest = max(self._sizes) if self.per == "tensor" and self._sizes else d
        return min(largest / self.levels**2, math.sqrt(largest) / self.levels)

    def __call__(self, v: Tensor, rng: torch.Generator) -> Sent:
        sizes = self._blocks(v)
        bits = len(sizes) * NORM_BITS + v.numel() * (1 + math.ceil(math.log2(self.levels + 1)))
        norm = torch.cat([part.norm().expand(part.shape) for part in torch.split(v, sizes)])
        scaled = v.abs() * (self.levels / torch.where(norm > 0, norm, 1))
        low = scaled.floor()
        coins = torch.rand(v.shape, generator=rng, dtype=torch.float64).to(v.device)
        return Sent(norm * v.sign() * (low + (coins < scaled - low)) / self.levels, bits)

    def _blocks(self, v: Tensor) -> list[int]:
        """Numbers of entries that share a norm."""
        if self.per == "vector":
            return [v.numel()]
        if self._sizes is None:
            raise ValueError(
                'Quantize(per="tensor") needs the module\'s parameters, to know where each lies. It is bound by'
                " FederatedServer; in simulate use bind(...) yourself: algorithm.bind(Layout.of(module)), Layout from"
                " lightning_fed.core.layout."
            )
        if sum(self._sizes) != v.numel():
            raise ValueError(
                f'Quantize(per="tensor") is bound to parameters with {sum(self._sizes)} entries, but the message has'
                f' {v.numel()}. Use per="vector".'
            )
        return list(self._sizes)
