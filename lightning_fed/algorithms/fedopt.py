"""The server that FedAdagrad, FedAdam and FedYogi share; each has its own estimate of squared changes."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.algorithms import fedavg
from lightning_fed.algorithms.fedavg import FedAvg, Message
from lightning_fed.core.algorithm import record, wide
from lightning_fed.core.messages import Total
from lightning_fed.core.validation import below_one, positive


@record
class ServerState(fedavg.ServerState):
    m: Tensor  # decaying mean of the changes Delta of all rounds, in float64
    v: Tensor  # estimate of Delta^2, entry by entry, in float64


@dataclass(frozen=True, kw_only=True)
class FedOpt(FedAvg):
    r"""Algorithm 2 of Reddi et al. 2021: an adaptive step of the server along the mean change of the local models.

    .. math::
        \Delta &= \textstyle\sum_{i\in S}\omega_i(x_i - \bar x), \quad m \leftarrow \beta_1 m + (1-\beta_1)\Delta, \quad
        v \leftarrow \mathrm{squares}(v, \Delta) \\
        \bar x &\leftarrow \bar x + \eta_s\, m / (\sqrt v + \tau), \qquad m = 0,\ v = \tau^2 \text{ at first}

    As printed: ``tau`` is added outside the root, ``v`` starts at its smallest allowed value (the paper's
    :math:`v_{-1} \ge \tau^2`), it is fed with :math:`\Delta` and not with :math:`m`, and neither moment is corrected
    for its start. The paper averages with equal weights; ``weights="samples"`` is the default of FedAvg here.
    """

    server_lr: float = 0.01
    beta1: float = 0.9
    tau: float = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        below_one(self, "beta1", "It is the part of the mean change m that a round keeps; 0 for no momentum.")
        positive(self, "tau", "It bounds how much small changes are enlarged; the paper uses 0.001.")

    @abstractmethod
    def squares(self, v: Tensor, delta: Tensor) -> Tensor:
        """The new estimate of the squared changes, from the old one and the mean change of this round."""

    def init_server(self, x0: Tensor) -> ServerState:
        start = wide(x0)
        return ServerState(x_bar=x0, m=torch.zeros_like(start), v=torch.full_like(start, self.tau**2))

    def server_step(self, server: fedavg.ServerState, total: Total[Message]) -> ServerState:
        assert isinstance(server, ServerState)
        delta = total.sum.delta_i / total.weight
        m = self.beta1 * server.m + (1 - self.beta1) * delta
        v = self.squares(server.v, delta)
        x_bar = wide(server.x_bar) + self.server_lr * m / (v.sqrt() + self.tau)
        return ServerState(x_bar.to(server.x_bar.dtype), m, v)
