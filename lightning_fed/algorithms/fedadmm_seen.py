from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from lightning_fed.algorithms.fedadmm_paper import ClientState as PaperState
from lightning_fed.algorithms.fedadmm_paper import PaperADMM
from lightning_fed.core.algorithm import Algorithm, record, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits


@record
class ClientState(PaperState):
    seen_i: Tensor  # 1 after the first visit that the server counted, 0 before; a scalar


@record
class ServerState:
    x_bar: Tensor  # the model
    x_tilde: Tensor  # weighted mean of x_hat_i over all n clients, those at x0 included that were not seen yet
    x0: Tensor  # the first model, in float64
    seen: Tensor  # fraction of the weight of all clients that belongs to clients seen so far, a scalar


@record
class Message:
    delta_i: Tensor  # change of x_hat_i
    joined_i: Tensor  # 1 in a client's first message, 0 later; a scalar


@dataclass(frozen=True)
class SeenADMM(Algorithm[ServerState, ClientState, Message]):
    r"""``FedADMM(mean="seen")``: the paper's method, averaging :math:`\hat x_i` over the clients seen so far.

    A client that was never seen still has :math:`\hat x_i = x^0`. With the fraction :math:`s` of seen weight, the mean
    over the seen clients is :math:`x^0 + (\tilde x - x^0)/s`, where :math:`\tilde x` is the paper's mean over all.
    """

    paper: PaperADMM

    def init_server(self, x0: Tensor) -> ServerState:
        first = self.paper.init_server(x0)
        return ServerState(first.x_bar, first.x_tilde, wide(x0), first.x_tilde.new_zeros(()))

    def init_client(self, x0: Tensor) -> ClientState:
        first = self.paper.init_client(x0)
        return ClientState(**vars(first), seen_i=torch.zeros_like(first.eta))

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        reply = self.paper.client_step(client, down, local)
        state = ClientState(**vars(reply.state), seen_i=torch.ones_like(client.seen_i))
        message = Message(reply.message.delta_i, state.seen_i - client.seen_i)
        return Reply(state, message, reply.x_i, reply.loss, reply.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        x_tilde = server.x_tilde + total.sum.delta_i / total.population
        seen = server.seen + total.sum.joined_i / total.population
        return self._read_out(replace(server, x_tilde=x_tilde, seen=seen))

    def share(self, client: ClientState) -> Tensor:
        return torch.cat([wide(client.x_hat_i), client.seen_i.reshape(1)])

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        means = revise(torch.cat([server.x_tilde, server.seen.reshape(1)]))
        return self._read_out(replace(server, x_tilde=means[:-1], seen=means[-1]))

    def _read_out(self, server: ServerState) -> ServerState:
        """The model that follows from the mean over the clients seen so far; before there are any, the one it was."""
        if not server.seen > 1e-12:  # everybody seen has left: only rounding is there
            return server
        x_seen = server.x0 + (server.x_tilde - server.x0) / server.seen
        x_bar = self.paper.g.prox(x_seen, 1 / self.paper.eta)
        return replace(server, x_bar=x_bar.to(server.x_bar.dtype))

    @property
    def traits(self) -> Traits:
        return self.paper.traits
