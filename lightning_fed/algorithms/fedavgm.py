from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.algorithms import fedavg
from lightning_fed.algorithms.fedavg import FedAvg, Message
from lightning_fed.core.algorithm import record, wide
from lightning_fed.core.messages import Total
from lightning_fed.core.validation import below_one


@record
class ServerState(fedavg.ServerState):
    v: Tensor  # velocity: decaying sum of the mean changes of all rounds, in float64


@dataclass(frozen=True, kw_only=True)
class FedAvgM(FedAvg):
    r"""FedAvg with momentum on the server (Hsu et al. 2019).

    .. math::
        \Delta = \textstyle\sum_{i\in S} \omega_i (x_i - \bar x), \qquad
        v \leftarrow \beta v + \Delta, \qquad \bar x \leftarrow \bar x + \eta_s v, \qquad v = 0 \text{ at first}

    The paper has :math:`\eta_s = 1`. In the long run the model moves by :math:`\eta_s/(1-\beta)` times a change: lower
    ``server_lr`` as beta grows. Flower's FedAvgM is this one too. The mean change m of :class:`FedAdam` has
    :math:`(1-\beta)\Delta` in place of :math:`\Delta`, which is this one with ``server_lr`` times 1 - beta.

    Args:
        beta: momentum, in [0, 1); 0 is FedAvg.
        server_lr: server step :math:`\eta_s`, > 0.
        weights: ``samples`` (as in the paper) or ``uniform``, as in :class:`FedAvg`.
        stragglers: fraction of clients whose replies are dropped, as in :class:`FedAvg`.

    Reference: arXiv:1909.06335.

    >>> from lightning_fed import Quadratic, simulate
    >>> found = simulate(FedAvgM(beta=0.5), [Quadratic.scalar(1.0, 1.0)], rounds=2)  # Delta = 1, then 1 - 1 = 0
    >>> [float(server.x_bar) for server in found.server]
    [0.0, 1.0, 1.5]
    """

    beta: float = 0.9

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "beta", "It is the part of the velocity that a round keeps; 0 is FedAvg.")

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, v=torch.zeros_like(wide(x0)))

    def server_step(self, server: fedavg.ServerState, total: Total[Message]) -> ServerState:
        assert isinstance(server, ServerState)
        v = self.beta * server.v + total.sum.delta_i / total.weight
        x_bar = wide(server.x_bar) + self.server_lr * v
        return ServerState(x_bar.to(server.x_bar.dtype), v)
