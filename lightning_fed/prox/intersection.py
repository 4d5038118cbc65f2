from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from lightning_fed.core.prox import Prox, check_parts, outside
from lightning_fed.core.validation import positive, whole
from lightning_fed.prox.elementary import length

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


@dataclass(frozen=True)
class Intersection(Prox):
    r"""Several constraints at once; Dykstra's iterations find the nearest point that satisfies all.

    .. math:: y_k = P_k(x + p_k), \quad p_k \leftarrow x + p_k - y_k, \quad x \leftarrow y_k, \qquad k = 1, \dots, K

    from :math:`x = v`, :math:`p_k = 0`. (Projecting in turn, without the :math:`p_k`, ends in some common point, not in
    the nearest.) The last set holds exactly, the others up to ``tolerance``.

    Args:
        parts: the sets; they must have a point in common.
        tolerance: stop when the moves :math:`y_k - x` of a sweep are smaller, relative to :math:`1 + \|v\|`. They do
            not vanish while sweeps return to the same :math:`x` (Birgin and Raydan, 2005).
        max_iterations: sweeps after which to stop with a warning.

    >>> from lightning_fed.prox import Box, L2Ball
    >>> Intersection([L2Ball(1.0), Box(0.0, 0.8)]).prox(torch.tensor([3.0, 1.0]), 1.0)
    tensor([0.8000, 0.6000])
    """

    parts: Sequence[Prox]
    tolerance: float = 1e-10
    max_iterations: int = 1000
    indicator = True

    def __post_init__(self) -> None:
        object.__setattr__(self, "parts", check_parts(self, self.parts))
        if others := [g for g in self.parts if not g.indicator]:
            raise ValueError(
                f"Intersection takes constraints, such as Box or L2Ball; {others[0]!r} is not a constraint. Use Sum for"
                " several g on disjoint parameters."
            )
        positive(self, "tolerance", "1e-10 is a good choice.")
        whole(self, "max_iterations", 1)

    def __call__(self, x: Tensor) -> Tensor:
        return sum((outside(x, g.prox(x, 1.0)) for g in self.parts), x.new_zeros(x.shape[:-1]))

    def prox(self, v: Tensor, t: float) -> Tensor:
        tolerance = max(self.tolerance, 10 * torch.finfo(v.dtype).eps) * (1 + length(v))
        x, p = v, [torch.zeros_like(v) for _ in self.parts]
        for _ in range(self.max_iterations):
            moved = torch.zeros_like(tolerance)
            for k, g in enumerate(self.parts):
                y = g.prox(x + p[k], t)
                moved += (y - x).square().sum(-1)
                x, p[k] = y, x + p[k] - y
            if (moved.sqrt() <= tolerance).all():
                return x
        warnings.warn(
            f"Intersection has not reached the nearest point after {self.max_iterations} sweeps, which still move it by"
            f" {float(moved.sqrt().max()):.1e}. Raise max_iterations or tolerance, or check that the sets"
            " have a common point.",
            stacklevel=2,
        )
        return x

    def bind(self, layout: Layout) -> Intersection:
        return replace(self, parts=[g.bind(layout) for g in self.parts])

    def acts_on(self, layout: Layout) -> tuple[str, ...]:
        chosen = {name for g in self.parts for name in g.acts_on(layout)}
        return tuple(name for name in layout.names if name in chosen)
