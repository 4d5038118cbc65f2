from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.algorithms.fedopt import FedOpt


@dataclass(frozen=True, kw_only=True)
class FedAdagrad(FedOpt):
    r"""FedAvg whose server takes steps of Adagrad (Reddi et al. 2021, Algorithm 2).

    .. math::
        \Delta &= \textstyle\sum_{i\in S}\omega_i(x_i - \bar x), \quad m \leftarrow \beta_1 m + (1-\beta_1)\Delta, \quad
        v \leftarrow v + \Delta^2 \\
        \bar x &\leftarrow \bar x + \eta_s\, m / (\sqrt v + \tau), \qquad m = 0,\ v = \tau^2 \text{ at first}

    v never falls, so steps shrink as 1/sqrt(rounds) while changes stay alike. Flower starts v at 0 and has no beta1.

    Args:
        server_lr: server step :math:`\eta_s`, > 0: about the distance that an entry moves in the first round.
        beta1: decay of the mean change, in [0, 1); the paper's experiments have 0, without momentum.
        tau: added to the root, > 0; the smaller, the more alike are the moves of all entries.
        weights: ``samples``, or ``uniform`` as in the paper's algorithm.
        stragglers: fraction of clients whose replies are dropped, as in :class:`FedAvg`.

    Reference: arXiv:2003.00295.

    >>> from lightning_fed import Quadratic, simulate
    >>> adagrad = FedAdagrad(server_lr=1.0, tau=1.5)  # Delta = 2: v = 2.25 + 4 = 6.25
    >>> float(simulate(adagrad, [Quadratic.scalar(1.0, 2.0)], rounds=1).x_bar)  # 2 / (2.5 + 1.5)
    0.5
    """

    server_lr: float = 0.1
    beta1: float = 0.0

    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        return v + delta**2
