from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, length_of, record, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local, Solution
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import positive


@record
class ClientState:
    c_i: Tensor  # control variate: an estimate of the gradient of f_i


@record
class ServerState:
    x_bar: Tensor  # the model
    c: Tensor  # mean of c_i over all n clients, in float64


@record
class Down(Broadcast):
    c: Tensor


@record
class Message:
    delta_i: Tensor  # y_i - x_bar
    c_delta_i: Tensor  # change of c_i


@dataclass(frozen=True)
class Scaffold(Algorithm[ServerState, ClientState, Message]):
    r"""Local steps corrected by control variates (Karimireddy et al. 2020).

    .. math::
        y &\leftarrow y - \gamma_k(\nabla f_i(y) - c_i + c) \text{ from } \bar x, \text{ K times} \\
        c_i^+ &= \nabla f_i(\bar x) \;\text{(option 1)} \quad\text{or}\quad
        c_i - c + (\bar x - y)/\textstyle\sum_k\gamma_k \;\text{(option 2)} \\
        \bar x &\leftarrow \bar x + \eta_g\tfrac1{|S|}\textstyle\sum_{i\in S}(y_i - \bar x), \quad
        c \leftarrow c + \tfrac1n\textstyle\sum_{i\in S}(c_i^+ - c_i)

    Args:
        option: 1 takes an extra gradient over the client's data; 2 computes it from the local steps at no cost, which
            is valid for plain SGD only: other optimisers are refused.
        server_lr: server step :math:`\eta_g`, > 0.

    Reference: arXiv:1910.06378.
    """

    option: Literal[1, 2] = 2
    server_lr: float = 1.0

    def __post_init__(self) -> None:
        if self.option not in (1, 2) or isinstance(self.option, bool):
            raise ValueError(f"Scaffold.option must be 1 or 2, got {self.option!r}.")
        positive(self, "server_lr", "1.0 takes the mean of the local models.")

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, c=torch.zeros_like(wide(x0)))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(c_i=torch.zeros_like(x0))

    def broadcast(self, server: ServerState, work: LocalWork) -> Down:
        return Down(server.x_bar, server.c.to(server.x_bar.dtype))

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        assert isinstance(down, Down)
        fresh = local.gradient(down.x_bar) if self.option == 1 else None
        sol = local.solve(down.x_bar, linear=down.c - client.c_i)
        c_i = self._off_the_steps(client, down, sol) if fresh is None else fresh
        message = Message(sol.x - down.x_bar, c_i - client.c_i)
        return Reply(ClientState(c_i), message, sol.x, sol.loss, sol.steps, gradients=int(fresh is not None))

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        x_bar = wide(server.x_bar) + self.server_lr * total.sum.delta_i / total.weight
        c = server.c + total.sum.c_delta_i / total.population
        return ServerState(x_bar.to(server.x_bar.dtype), c)

    def acknowledge(self, before: ClientState, after: ClientState, arrived: Message) -> ClientState:
        return ClientState(c_i=before.c_i + arrived.c_delta_i)

    def _off_the_steps(self, client: ClientState, down: Down, sol: Solution) -> Tensor:
        length = length_of(sol, self)
        return client.c_i - down.c + (down.x_bar - sol.x) / length if length else client.c_i

    @property
    def traits(self) -> Traits:
        why = "Scaffold(option=2) computes gradients from the local steps. Use option=1."
        return Traits(requires={"plain_sgd": why} if self.option == 2 else {})
