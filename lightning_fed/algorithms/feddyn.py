from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, Weights, record, start_point, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import DualSteps, Traits
from lightning_fed.core.validation import one_of, positive


@record
class ClientState:
    x_i: Tensor  # local model
    q_i: Tensor  # the gradient of f_i at the last local model, if the local problem was solved exactly


@record
class ServerState:
    x_bar: Tensor  # the model
    h: Tensor  # mean of q_i over all n clients, in float64


@record
class Message:
    delta_i: Tensor  # x_i - x_bar


@dataclass(frozen=True)
class FedDyn(Algorithm[ServerState, ClientState, Message]):
    r"""Dynamic regularisation (Acar et al. 2021).

    .. math::
        x_i &\approx \arg\min_x f_i(x) - \langle q_i, x\rangle + \tfrac\alpha2\|x - \bar x\|^2, \quad
        q_i \leftarrow q_i - \alpha (x_i - \bar x) \\
        h &\leftarrow h - \alpha \textstyle\sum_{i\in S} w_i (x_i - \bar x), \quad
        \bar x \leftarrow \textstyle\sum_{i\in S} w_i x_i / \sum_{i\in S} w_i - h/\alpha

    With all clients in every round it is ``FedADMM(eta=alpha)``; with partial cohorts it differs, because it averages
    the models of the *cohort* but the duals of *all* clients.

    Args:
        alpha: penalty, > 0.
        start: local work starts at the ``server`` model, the ``local`` one, or the ``centre`` of the quadratic.
        weights: ``uniform`` (1/n, the paper) or ``samples`` (N_i / N).

    Reference: arXiv:2111.04263. The weights ``samples`` are ours.

    >>> from lightning_fed import Quadratic, simulate
    >>> from lightning_fed.algorithms import FedADMM
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> methods = FedDyn(alpha=2.0), FedADMM(eta=2.0)  # the same method when all clients take part
    >>> [round(float(simulate(method, clients, rounds=2).x_bar), 6) for method in methods]
    [1.133333, 1.133333]
    """

    alpha: float = 1.0
    start: Start = "server"
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        positive(self, "alpha", "It weighs |x_i - x_bar|^2; start from 1.0.")
        one_of(self, "start", ("local", "server", "centre"))
        one_of(self, "weights", ("uniform", "samples"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, h=torch.zeros_like(wide(x0)))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(x_i=x0, q_i=torch.zeros_like(x0))

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        x_bar = down.x_bar
        own = client.x_i
        start = start_point(self.start, own=own, server=x_bar, centre=lambda: x_bar + client.q_i / self.alpha)
        sol = local.solve(start, linear=-client.q_i, rho=self.alpha, center=x_bar)
        q_i = client.q_i - self.alpha * (sol.x - x_bar)
        return Reply(ClientState(sol.x, q_i), Message(sol.x - x_bar), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        h = server.h - self.alpha * total.sum.delta_i / total.population
        x_bar = wide(server.x_bar) + total.sum.delta_i / total.weight - h / self.alpha
        return ServerState(x_bar.to(server.x_bar.dtype), h)

    def acknowledge(self, before: ClientState, after: ClientState, arrived: Message, down: Broadcast) -> ClientState:
        return replace(after, q_i=before.q_i - self.alpha * arrived.delta_i)

    def share(self, client: ClientState) -> Tensor:
        return client.q_i

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        h = revise(server.h)
        x_bar = wide(server.x_bar) + (server.h - h) / self.alpha
        return ServerState(x_bar.to(server.x_bar.dtype), h)

    @property
    def traits(self) -> Traits:
        return Traits(penalty=self.alpha)

    @property
    def dual_steps(self) -> DualSteps:
        return DualSteps(gain=1.0, rate=1.0, solved=True)
