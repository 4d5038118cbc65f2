from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, Weights, record, start_point, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.prox import Prox, Zero


@record
class ClientState:
    x_i: Tensor  # local model, where the next visit starts if start="local"
    z_i: Tensor  # dual variable of x_i = x_bar; never leaves the client
    eta: Tensor  # penalty of its last visit, a scalar: a resumed run may use another penalty

    @property
    def x_hat_i(self) -> Tensor:
        """This client's share of x_tilde, as the server last summed it: the same bits on every machine.

        The product is rounded before it is added: torch.add(alpha=) rounds once or twice, depending on the machine.
        """
        return self.x_i + self.z_i * (1 / self.eta).unsqueeze(-1).to(self.z_i.dtype)


@record
class ServerState:
    x_bar: Tensor  # the model
    x_tilde: Tensor  # weighted mean of x_hat_i over all n clients, in float64


@record
class Message:
    delta_i: Tensor  # change of x_hat_i


@dataclass(frozen=True)
class PaperADMM(Algorithm[ServerState, ClientState, Message]):
    r"""``FedADMM(mean="all")``: the paper's method, whose server averages :math:`\hat x_i` over all n clients."""

    eta: float = 1.0
    alpha: float = 1.0
    g: Prox = Zero()
    weights: Weights = "uniform"
    start: Start = "server"
    project_initial: bool = False

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=self.g.prox(x0, 1 / self.eta) if self.project_initial else x0, x_tilde=wide(x0))

    def init_client(self, x0: Tensor) -> ClientState:
        eta = torch.full((), self.eta, dtype=wide(x0[:0]).dtype, device=x0.device)
        return ClientState(x_i=x0, z_i=torch.zeros_like(x0), eta=eta)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        x_bar_i = down.x_bar if self.alpha == 1 else torch.lerp(client.x_i, down.x_bar, self.alpha)
        own, server = client.x_i, down.x_bar
        start = start_point(self.start, own=own, server=server, centre=lambda: x_bar_i - client.z_i / self.eta)
        sol = local.solve(start, linear=client.z_i, rho=self.eta, center=x_bar_i)
        z_i = torch.add(client.z_i, sol.x - x_bar_i, alpha=self.eta)
        state = ClientState(sol.x, z_i, torch.full_like(client.eta, self.eta))
        return Reply(state, Message(state.x_hat_i - client.x_hat_i), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        x_tilde = server.x_tilde + total.sum.delta_i / total.population
        return ServerState(self.g.prox(x_tilde, 1 / self.eta).to(server.x_bar.dtype), x_tilde)

    def share(self, client: ClientState) -> Tensor:
        return client.x_hat_i

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        x_tilde = revise(server.x_tilde)
        return ServerState(self.g.prox(x_tilde, 1 / self.eta).to(server.x_bar.dtype), x_tilde)

    @property
    def traits(self) -> Traits:
        return Traits(penalty=self.eta, relaxation=self.alpha, sends_changes=True)
