from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from torch import Tensor

#: ``prox(v, t)``: the minimiser of ``f(x) + |x - v|^2 / (2t)``.
ProxOperator = Callable[[Tensor, float], Tensor]


@dataclass(frozen=True, eq=False)
class Iterate:
    """One step of two-operator splitting: ``y`` is a prox of f, ``z`` a prox of g, ``x`` the updated variable."""

    y: Tensor
    z: Tensor
    x: Tensor


def douglas_rachford(
    prox_f: ProxOperator, prox_g: ProxOperator, x0: Tensor, eta_hat: float = 1.0, alpha: float = 1.0
) -> Iterator[Iterate]:
    r"""Yield the steps of two-operator splitting for :math:`\min f(x) + g(x)`, without end.

    .. math::
        y = \mathrm{prox}_{\hat\eta f}(x), \quad z = \mathrm{prox}_{\hat\eta g}(2y - x), \quad
        x \leftarrow x + \alpha(z - y)

    ``alpha = 1`` is Douglas-Rachford, 2 Peaceman-Rachford.

    >>> import torch
    >>> from itertools import islice
    >>> nearest = lambda v, t: (v + 3 * t) / (1 + t)  # f(x) = (x - 3)^2 / 2
    >>> steps = islice(douglas_rachford(nearest, lambda v, t: v.clamp(max=1.0), torch.zeros(1)), 40)
    >>> round(float(list(steps)[-1].z), 6)
    1.0
    """
    x = x0
    while True:
        y = prox_f(x, eta_hat)
        z = prox_g(2 * y - x, eta_hat)
        x = x + alpha * (z - y)
        yield Iterate(y, z, x)
