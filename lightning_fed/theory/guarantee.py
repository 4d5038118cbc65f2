"""What FedADMM's theorem asks for, from measured curvature: penalty, step size and local steps."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_fed.theory.residuals import contraction, penalty_bound, steps_for

#: Local work is enough if it shrinks the gradient of the local problem to this share.
ENOUGH = 0.1

#: The penalty is this many times the theorem's bound, which it has to exceed.
ABOVE = 1.1


@dataclass(frozen=True)
class CurvatureRange:
    """Curvature of the clients' losses at the first model, and after some gradient steps from it.

    Args:
        at_start: largest curvature of any measured client at the first model.
        later: the same after ``steps`` gradient steps.
        steps: number of gradient steps between the two points.
        lowest: lowest curvature of any measured client at either point; NaN if it is unknown.
        method: "hessian" (power iteration) or "differences" (of gradients).
        clients: number of clients that were measured.
    """

    at_start: float
    later: float
    steps: int
    lowest: float
    method: str
    clients: int = 1

    @property
    def L(self) -> float:  # noqa: N802 - the paper's letter
        """Largest curvature at either point."""
        return max(self.at_start, self.later)

    @property
    def negative(self) -> float:
        """The most negative curvature, or 0; -L if it is not known."""
        return -self.L if math.isnan(self.lowest) else min(self.lowest, 0.0)


@dataclass(frozen=True)
class Guarantee:
    r"""Settings of FedADMM(mean="all") under which its theorem holds, as far as the measured L is the true one.

    Args:
        eta: 1.1 times the theorem's lower bound of the penalty, which is about 2.4 L.
        lr: :math:`1 / (L + \eta)`, the quickest gradient step; steps of twice that and more diverge.
        local_steps: full gradient steps of that size that shrink the local problem's gradient to a tenth.
        alpha: upper limit of the relaxation at this penalty, if local work is nearly exact: :math:`2 - 2 L / \eta`.
    """

    eta: float
    lr: float
    local_steps: int
    alpha: float


def guarantee(curvature: CurvatureRange) -> Guarantee:
    """The settings that the theorem asks for.

    >>> guarantee(CurvatureRange(at_start=4.0, later=3.0, steps=10, lowest=0.0, method="hessian"))
    Guarantee(eta=10.547..., lr=0.0687..., local_steps=2, alpha=1.241...)
    """
    L = curvature.L
    eta = ABOVE * penalty_bound(L, 1.0)
    lr = 1 / (L + eta)
    steps = steps_for(ENOUGH, contraction(lr, eta, L, curvature.negative))
    return Guarantee(eta, lr, int(steps), 2 - 2 * L / eta)
