from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.algorithms.fedopt import FedOpt
from lightning_fed.core.validation import below_one


@dataclass(frozen=True, kw_only=True)
class FedYogi(FedOpt):
    r"""FedAvg whose server takes steps of Yogi (Reddi et al. 2021, Algorithm 2).

    .. math::
        \Delta &= \textstyle\sum_{i\in S}\omega_i(x_i - \bar x), \quad m \leftarrow \beta_1 m + (1-\beta_1)\Delta, \quad
        v \leftarrow v - (1-\beta_2)\Delta^2\,\mathrm{sign}(v - \Delta^2) \\
        \bar x &\leftarrow \bar x + \eta_s\, m / (\sqrt v + \tau), \qquad m = 0,\ v = \tau^2 \text{ at first}

    v falls by at most :math:`(1-\beta_2)\Delta^2` in a round: after large changes it stays large for longer than
    :class:`FedAdam`'s, and where they differ little from v both move alike. Flower starts v at 0.

    Args:
        server_lr: server step :math:`\eta_s`, > 0: about the distance that an entry moves in a round.
        beta1: decay of the mean change, in [0, 1); the paper's 0.9.
        beta2: 1 - beta2 is the step of v, in [0, 1); the paper's 0.99.
        tau: added to the root, > 0; the smaller, the more alike are the moves of all entries.
        weights: ``samples``, or ``uniform`` as in the paper's algorithm.
        stragglers: fraction of clients whose replies are dropped, as in :class:`FedAvg`.

    Reference: arXiv:2003.00295.

    >>> from lightning_fed import Quadratic, simulate
    >>> yogi = FedYogi(server_lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)  # Delta = 2: m = 1, v = 1 + 0.25 * 4 = 2
    >>> round(float(simulate(yogi, [Quadratic.scalar(1.0, 2.0)], rounds=1).x_bar), 6)  # 1 / (1.414214 + 1)
    0.414214
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "beta2", "1 - beta2 is the step of the squares v; the paper has 0.99.")

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        return v - (1 - self.beta2) * delta**2 * (v - delta**2).sign()
