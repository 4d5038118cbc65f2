r"""Estimates of L, the Lipschitz constant of a client's gradient, near the model that a module holds.

Both are lower bounds of L: :func:`largest` gives the largest curvature at one point, :func:`largest_quotient` between a
few points near it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Generator, Tensor, nn

from lightning_fed.core.layout import Layout, clones, overwrite, parameters_of
from lightning_fed.core.memory import ClientId
from lightning_fed.evaluation.evaluate import client_derivative, client_gradient
from lightning_fed.lightning import pl

#: A linear map from vectors to vectors, such as the product with a Hessian.
Map = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Curvature:
    """Measured ``L`` and ``lowest`` eigenvalue (nan if not asked for).

    ``method`` is ``"hessian"`` (power iteration) or ``"differences"`` (of gradients, if there is no second
    derivative), ``products`` the number of passes over the data.
    """

    L: float
    lowest: float
    method: str
    products: int


def largest(product: Map, start: Tensor, iterations: int = 20, tolerance: float = 1e-2) -> tuple[float, int]:
    """Largest absolute eigenvalue of a symmetric map, by power iteration from ``start``; and the number of products.

    |Hv| of unit vectors v never falls between iterations and never exceeds the eigenvalue, whatever the signs. The
    iteration ends when |Hv| grows by less than ``tolerance``, relatively.

    >>> H = torch.diag(torch.tensor([-3.0, 2.0, 1.0], dtype=torch.float64))
    >>> value, _ = largest(H.mv, torch.ones(3, dtype=torch.float64), iterations=200, tolerance=1e-12)
    >>> round(value, 6)
    3.0
    """
    v, value = start / start.norm(), 0.0
    for k in range(1, iterations + 1):
        v = product(v)
        before, value = value, float(v.norm())
        if not value or not value < float("inf") or value - before <= tolerance * value:
            return value, k
        v = v / value
    return value, iterations


def largest_quotient(
    gradient: Map, x: Tensor, direction: Tensor, steps: int = 20, radius: float | None = None
) -> tuple[float, int]:
    r"""Largest :math:`\|\nabla f(y)-\nabla f(x)\|/\|y-x\|` of successive points near ``x``, and the count of gradients.

    Each step moves by ``radius`` along the last change of the gradient, which for a quadratic is power iteration.

    >>> largest_quotient(lambda x: torch.tensor([-3.0, 2.0]) * x, torch.ones(2), torch.ones(2), radius=1.0)[0]
    3.0
    """
    length = radius or torch.finfo(x.dtype).eps ** 0.5 * (1 + float(x.norm()))
    slope, best = gradient(x), 0.0
    for k in range(1, steps + 1):
        y = x + length * direction / direction.norm()
        x, slope, direction, moved = y, (new := gradient(y)), new - slope, float((y - x).norm())
        change = float(direction.norm())
        if not 0 < change < float("inf"):
            return (best if change == 0 else change), k + 1
        best = max(best, change / moved)
    return best, steps + 1


def client_curvature(
    trainer: pl.Trainer,
    layout: Layout,
    cid: ClientId,
    generator: Generator,
    *,
    iterations: int = 20,
    tolerance: float = 1e-2,
    lowest: bool = False,
) -> Curvature:
    """The curvature of a client's loss over all its training data, in evaluation mode, at the model the module holds.

    The module, its metrics and other random streams stay unchanged.

    Args:
        generator: draws the first direction.
        iterations, tolerance: when to end; see :func:`largest`.
        lowest: also find the lowest eigenvalue, negative if the loss is not convex; doubles the work.
    """
    start = torch.randn(layout.numel, generator=generator, dtype=torch.float64).to(_point(trainer, layout))
    product = partial(_hessian_product, trainer, layout, cid)
    try:
        L, products = largest(product, start, iterations, tolerance)
    except RuntimeError:  # no second derivative; the first derivative raises any other error again
        return _by_differences(trainer, layout, cid, start, iterations)
    low = float("nan")
    if lowest:
        span, more = largest(lambda v: L * v - product(v), start, iterations, tolerance / 10)
        low, products = L - span, products + more
    return Curvature(L, low, "hessian", products)


def _hessian_product(trainer: pl.Trainer, layout: Layout, cid: ClientId, v: Tensor) -> Tensor:
    """The second derivative of the client's loss along ``v``."""
    parts = layout.split(v)

    def along(loss: Tensor, params: list[nn.Parameter]) -> Sequence[Tensor | None]:
        grads = torch.autograd.grad(loss, params, create_graph=True, allow_unused=True)
        pairs = [(g, parts[name].to(g)) for g, name in zip(grads, layout.names, strict=True) if g is not None]
        slope: Any = sum((g * part).sum() for g, part in pairs)
        if not pairs or not slope.requires_grad:  # the loss is linear
            return [None] * len(params)
        _check_differentiable_twice(slope)
        return torch.autograd.grad(slope, params, allow_unused=True)

    return client_derivative(trainer, layout, cid, along)


def _check_differentiable_twice(slope: Tensor) -> None:
    """Refuse functions marked ``once_differentiable``, whose second derivatives autograd silently leaves out."""
    nodes, seen = [slope.grad_fn], set()
    while nodes:
        node = nodes.pop()
        if node is None or node in seen:
            continue
        if type(node).__name__ == "Error":
            raise RuntimeError("a function is marked once_differentiable")
        seen.add(node)
        nodes.extend(following for following, _ in node.next_functions)


def _by_differences(
    trainer: pl.Trainer, layout: Layout, cid: ClientId, direction: Tensor, iterations: int
) -> Curvature:
    parameters = parameters_of(trainer.lightning_module)
    kept = clones(parameters)

    def gradient(x: Tensor) -> Tensor:
        overwrite(parameters, layout.split(x))
        return client_gradient(trainer, layout, cid)

    try:
        L, gradients = largest_quotient(gradient, _point(trainer, layout), direction, iterations)
    finally:
        overwrite(parameters, kept)
    return Curvature(L, float("nan"), "differences", gradients)


def _point(trainer: pl.Trainer, layout: Layout) -> Tensor:
    return layout.flatten(parameters_of(trainer.lightning_module))
