from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Weights, record, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.validation import one_of, positive


@record
class ClientState:
    """Empty: clients keep no state."""


@record
class ServerState:
    x_bar: Tensor  # the model


@record
class Message:
    delta_i: Tensor  # x_i - x_bar


@dataclass(frozen=True, kw_only=True)
class FedAvg(Algorithm[ServerState, ClientState, Message]):
    r"""Average of local models (McMahan et al. 2017).

    .. math::
        x_i \approx \arg\min_x f_i(x) \text{ from } \bar x, \qquad
        \bar x \leftarrow \bar x + \eta_s \textstyle\sum_{i\in S} \omega_i (x_i - \bar x)

    With more than one local step and unlike clients the fixed point is *not* a minimiser of the mean.

    Args:
        server_lr: server step :math:`\eta_s`, > 0.
        weights: ``samples`` (N_i over the samples of the cohort) or ``uniform`` (``1 / |S|``).
        stragglers: fraction in [0, 1] of clients that do not finish in time: the round drops their replies.

    Reference: arXiv:1602.05629.

    >>> from lightning_fed import GradientDescent, Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x; their mean is minimal at 1
    >>> work = GradientDescent(steps=1, lr=0.25)
    >>> float(simulate(FedAvg(), clients, rounds=1, solver=work).x_bar)  # one step: 0.25 * (3 + 1) / 2
    0.5
    >>> work = GradientDescent(steps=40, lr=0.25)
    >>> round(float(simulate(FedAvg(), clients, rounds=60, solver=work).x_bar), 2)  # many: the mean of 3 and 1/3
    1.67
    """

    server_lr: float = 1.0
    weights: Weights = "samples"
    stragglers: float = 0.0

    def __post_init__(self) -> None:
        positive(self, "server_lr", "1.0 takes the mean of the local models.")
        one_of(self, "weights", ("uniform", "samples"))
        positive(self, "stragglers", "It is the share of clients that do not finish.", zero=True, upper=1)

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0)

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState()

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        if self.work_done(local) < 1:
            return Reply(client, Message(torch.zeros_like(down.x_bar)), down.x_bar, arrived=False)
        sol = local.solve(down.x_bar)
        return Reply(client, Message(sol.x - down.x_bar), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        x_bar = wide(server.x_bar) + self.server_lr * total.sum.delta_i / total.weight
        return ServerState(x_bar.to(server.x_bar.dtype))

    def work_done(self, local: Local) -> float:
        """Fraction of its work that a client finishes: below 1 for stragglers, equal in FedAvg and its subclasses."""
        if not self.stragglers:
            return 1.0
        late, share = torch.rand(2, generator=local.rng("straggler"), dtype=torch.float64).tolist()
        return float(share) if late < self.stragglers else 1.0
