"""How far a federation is from a solution: residuals and the gradient mapping; and what its penalty should exceed."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.theory.bounds import eta_min, exact_eta_min

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation
    from lightning_fed.core.round import Outcome


def primal_residual(federation: Federation, outcome: Outcome) -> float:
    r"""Mean of :math:`\|x_i - \bar x\|` over all clients, or over the cohort where clients keep no model."""
    x_bar, algorithm = federation.server.x_bar, federation.algorithm
    n, seen = len(federation.weights), list(federation.store)
    models = [algorithm.local_model(federation.recall(cid)) for cid in seen]
    if models and models[0] is not None:
        unseen = (n - len(seen)) * float((federation.x0 - x_bar).norm())
        return (unseen + sum(float((x_i - x_bar).norm()) for x_i in models if x_i is not None)) / n
    distances = [float((x_i - x_bar).norm()) for x_i in outcome.local_models.values()]
    return sum(distances) / len(distances) if distances else float("nan")


def dual_residual(algorithm: Algorithm[Any, Any, Any], old: Tensor, new: Tensor) -> float:
    r""":math:`\rho\|\bar x^{k+1} - \bar x^k\|`, by how much the clients' optimality is off after the server moved.

    Not a number for algorithms without a penalty, and when the set of trainable parameters has just changed.
    """
    if not algorithm.traits.penalty or old.shape != new.shape:
        return float("nan")
    return algorithm.traits.penalty * float((new - old).norm())


def gradient_mapping(algorithm: Algorithm[Any, Any, Any], x: Tensor, gradient: Tensor, rho: float) -> Tensor:
    r""":math:`G(x) = \rho\,(x - \mathrm{prox}_{g/\rho}(x - \nabla f(x)/\rho))`: zero iff ``x`` is stationary.

    ``gradient`` is that of :math:`\sum_i w_i f_i` at ``x``. For :math:`g = 0` the mapping is the gradient itself.
    """
    return rho * (x - algorithm.g.prox(x - gradient / rho, 1 / rho))


def penalty_bound(L: float, alpha: float, gamma4: float = 0.05) -> float:
    """What the penalty must exceed: :func:`eta_min`, or :func:`exact_eta_min` for ``alpha`` other than 1; inf at 2.

    >>> round(penalty_bound(1.0, alpha=1.0), 6), penalty_bound(1.0, alpha=1.5), penalty_bound(1.0, alpha=2.0)
    (2.397181, 4.0, inf)
    """
    if L == 0 or alpha == 2:
        return 0.0 if L == 0 else math.inf
    return eta_min(L, gamma4) if alpha == 1 else exact_eta_min(L, alpha)


def contraction(lr: float, rho: float, L: float, lowest: float) -> float:
    r"""By what a gradient step on the local problem shrinks its gradient, at worst; 1 and more where it need not.

    The curvature of :math:`f_i` lies in [``lowest``, L], that of the problem between ``lowest`` :math:`+ \rho` and
    :math:`L + \rho`.

    >>> round(contraction(lr=0.1, rho=1.0, L=4.0, lowest=0.0), 12), round(contraction(0.1, 1.0, 4.0, lowest=-2.0), 12)
    (0.9, 1.1)
    """
    return max(abs(1 - lr * (rho + lowest)), abs(1 - lr * (rho + L)))


def steps_for(shrinkage: float, factor: float) -> float:
    """Steps that shrink a gradient to ``shrinkage`` of what it was, each by ``factor``; inf where they do not.

    >>> steps_for(0.1, 0.9), steps_for(0.1, 1.1)
    (22, inf)
    """
    if factor >= 1:
        return math.inf
    return 1 if factor <= shrinkage else math.ceil(math.log(shrinkage) / math.log(factor))
