"""Distance of a federation from a solution: residuals and the gradient mapping; and bounds of the penalty."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.core.memory import ClientId
from lightning_fed.theory.bounds import eta_min, exact_eta_min

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation
    from lightning_fed.core.round import Outcome


def primal_residual(federation: Federation, outcome: Outcome) -> float:
    r"""Mean of :math:`\|x_i - \bar x\|` over the cohort, with the new :math:`\bar x`.

    Over the cohort, not over all clients: it must not take longer the more clients have been visited.

    >>> import torch
    >>> from types import SimpleNamespace
    >>> federation = SimpleNamespace(server=SimpleNamespace(x_bar=torch.tensor([0.0, 0.0])))
    >>> outcome = SimpleNamespace(local_models={"a": torch.tensor([3.0, 4.0]), "b": torch.tensor([0.0, 1.0])})
    >>> primal_residual(federation, outcome)  # mean of 5 and 1
    3.0
    """
    return mean_distance(distances(federation, outcome))


def distances(federation: Federation, outcome: Outcome) -> dict[ClientId, float]:
    """Distances to the new x_bar of the local models that are known in this process."""
    x_bar = federation.server.x_bar
    return {cid: float((x_i - x_bar).norm()) for cid, x_i in outcome.local_models.items()}


def mean_distance(found: Mapping[ClientId, float]) -> float:
    """The mean of distances by client; NaN if there are none."""
    return sum(found.values()) / len(found) if found else float("nan")


def dual_residual(algorithm: Algorithm[Any, Any, Any], old: Tensor, new: Tensor) -> float:
    r""":math:`\rho\|\bar x^{k+1} - \bar x^k\|`, the error of the clients' optimality after the server moved.

    NaN for algorithms without a penalty, and when the set of trainable parameters has just changed.

    >>> import torch
    >>> from lightning_fed.algorithms import FedADMM, FedAvg
    >>> old, new = torch.tensor([0.0, 0.0]), torch.tensor([3.0, 4.0])
    >>> dual_residual(FedADMM(eta=2.0), old, new), dual_residual(FedAvg(), old, new)
    (10.0, nan)
    """
    if not algorithm.traits.penalty or old.shape != new.shape:
        return float("nan")
    return algorithm.traits.penalty * float((new - old).norm())


def gradient_mapping(algorithm: Algorithm[Any, Any, Any], x: Tensor, gradient: Tensor, rho: float) -> Tensor:
    r""":math:`G(x) = \rho\,(x - \mathrm{prox}_{g/\rho}(x - \nabla f(x)/\rho))`: zero iff ``x`` is stationary.

    ``gradient`` is that of :math:`\sum_i w_i f_i` at ``x``. For :math:`g = 0` the mapping is the gradient itself.

    >>> import torch
    >>> from lightning_fed.algorithms import FedADMM
    >>> from lightning_fed.prox import L1
    >>> x, gradient = torch.tensor([1.5, 0.0]), torch.tensor([-0.5, 0.1])  # of |x|^2 / 2 - <b, x> at b = (2, -0.1)
    >>> gradient_mapping(FedADMM(g=L1(0.5)), x, gradient, rho=2.0).tolist()  # x minimises it plus |x|_1 / 2
    [0.0, 0.0]
    >>> gradient_mapping(FedADMM(), x, gradient, rho=2.0)
    tensor([-0.5000,  0.1000])
    """
    return rho * (x - algorithm.g.prox(x - gradient / rho, 1 / rho))


def penalty_bound(L: float, alpha: float, gamma4: float = 0.05) -> float:
    """Lower bound of the penalty: :func:`eta_min`, or :func:`exact_eta_min` for ``alpha`` other than 1; inf at 2.

    >>> round(penalty_bound(1.0, alpha=1.0), 6), penalty_bound(1.0, alpha=1.5), penalty_bound(1.0, alpha=2.0)
    (2.397181, 4.0, inf)
    """
    if L == 0 or alpha == 2:
        return 0.0 if L == 0 else math.inf
    return eta_min(L, gamma4) if alpha == 1 else exact_eta_min(L, alpha)


def contraction(lr: float, rho: float, L: float, lowest: float) -> float:
    r"""Worst factor by which a gradient step on the local problem shrinks its gradient; 1 or more if it may grow.

    The curvature of :math:`f_i` lies in [``lowest``, L], that of the problem between ``lowest`` :math:`+ \rho` and
    :math:`L + \rho`.

    >>> round(contraction(lr=0.1, rho=1.0, L=4.0, lowest=0.0), 12), round(contraction(0.1, 1.0, 4.0, lowest=-2.0), 12)
    (0.9, 1.1)
    """
    return max(abs(1 - lr * (rho + lowest)), abs(1 - lr * (rho + L)))


def steps_for(shrinkage: float, factor: float) -> float:
    """Number of steps of ``factor`` that shrink a gradient to the share ``shrinkage``; inf if none do.

    >>> steps_for(0.1, 0.9), steps_for(0.1, 1.1)
    (22, inf)
    """
    if factor >= 1:
        return math.inf
    return 1 if factor <= shrinkage else math.ceil(math.log(shrinkage) / math.log(factor))
