from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.algorithms.fedopt import FedOpt
from lightning_fed.core.validation import below_one


@dataclass(frozen=True, kw_only=True)
class FedAdam(FedOpt):
    r"""FedAvg whose server takes steps of Adam (Reddi et al. 2021, Algorithm 2).

    .. math::
        \Delta &= \textstyle\sum_{i\in S}\omega_i(x_i - \bar x), \quad m \leftarrow \beta_1 m + (1-\beta_1)\Delta, \quad
        v \leftarrow \beta_2 v + (1-\beta_2)\Delta^2 \\
        \bar x &\leftarrow \bar x + \eta_s\, m / (\sqrt v + \tau), \qquad m = 0,\ v = \tau^2 \text{ at first}

    Moments are not corrected for their start, as they are in ``torch.optim.Adam``: that is not in the paper. Flower
    starts v at 0, where the paper wants at least :math:`\tau^2`.

    Args:
        server_lr: server step :math:`\eta_s`, > 0: about the distance that an entry moves in a round.
        beta1: decay of the mean change, in [0, 1); the paper's 0.9.
        beta2: decay of the mean square, in [0, 1); the paper's 0.99.
        tau: added to the root, > 0; the smaller, the more alike are the moves of all entries.
        weights: ``samples``, or ``uniform`` as in the paper's algorithm.
        stragglers: fraction of clients whose replies are dropped, as in :class:`FedAvg`.

    Reference: arXiv:2003.00295.

    >>> from lightning_fed import Quadratic, simulate
    >>> adam = FedAdam(server_lr=1.0, beta1=0.5, beta2=0.75, tau=1.0)  # Delta = 2: m = 1, v = 0.75 + 0.25 * 4 = 1.75
    >>> round(float(simulate(adam, [Quadratic.scalar(1.0, 2.0)], rounds=1).x_bar), 6)  # 1 / (1.322876 + 1)
    0.430501
    """

    beta2: float = 0.99

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "beta2", "It is the part of the mean square v that a round keeps; the paper has 0.99.")

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        return self.beta2 * v + (1 - self.beta2) * delta**2
