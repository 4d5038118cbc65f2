from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, record, start_point, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive


@record
class ClientState:
    x_i: Tensor  # local model: the last prox
    z_i: Tensor  # this client's copy of the split variable


@record
class ServerState:
    x_bar: Tensor  # the model
    z_bar: Tensor  # mean of z_i over all n clients, in float64


@record
class Message:
    delta_i: Tensor  # change of z_i


@dataclass(frozen=True)
class FedSplit(Algorithm[ServerState, ClientState, Message]):
    r"""Peaceman-Rachford splitting on the consensus problem (Pathak, Wainwright 2020); all clients, every round.

    .. math::
        x_i \approx \mathrm{prox}_{s f_i}(2\bar x - z_i), \quad z_i \leftarrow z_i + 2(x_i - \bar x), \quad
        \bar x = \tfrac1n\textstyle\sum_i z_i

    It is ``FedDR(eta_hat=s, alpha=2)`` with all clients in every round. Convergence is proved for convex losses only.

    Args:
        s: step of the prox, > 0: the larger, the longer the steps.
        start: local work starts at the ``server`` model, the ``local`` one, or the ``centre`` of the prox.

    Reference: arXiv:2005.05238.

    >>> from lightning_fed import Quadratic, simulate
    >>> from lightning_fed.algorithms import FedDR
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # their mean is minimal at 1
    >>> methods = FedSplit(s=0.5), FedDR(eta_hat=0.5, alpha=2.0)
    >>> [round(float(simulate(method, clients, rounds=40).x_bar), 6) for method in methods]
    [1.0, 1.0]
    """

    s: float = 1.0
    start: Start = "server"

    def __post_init__(self) -> None:
        positive(self, "s", "It is the step of the local prox; start from 1.0.")
        one_of(self, "start", ("local", "server", "centre"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, z_bar=wide(x0))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(x_i=x0, z_i=x0)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        centre = 2 * down.x_bar - client.z_i
        start = start_point(self.start, own=client.x_i, server=down.x_bar, centre=lambda: centre)
        sol = local.solve(start, rho=1 / self.s, center=centre)
        z_i = client.z_i + 2 * (sol.x - down.x_bar)
        return Reply(ClientState(sol.x, z_i), Message(z_i - client.z_i), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        z_bar = server.z_bar + total.sum.delta_i / total.population
        return ServerState(z_bar.to(server.x_bar.dtype), z_bar)

    def acknowledge(self, before: ClientState, after: ClientState, arrived: Message, down: Broadcast) -> ClientState:
        return replace(after, z_i=before.z_i + arrived.delta_i)

    def share(self, client: ClientState) -> Tensor:
        return client.z_i

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        z_bar = revise(server.z_bar)
        return ServerState(z_bar.to(server.x_bar.dtype), z_bar)

    @property
    def traits(self) -> Traits:
        return Traits(penalty=1 / self.s, everybody=True)
