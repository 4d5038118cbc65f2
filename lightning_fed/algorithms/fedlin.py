from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Generator, Tensor

from lightning_fed.core.algorithm import Algorithm, num_bytes, record, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import whole
from lightning_fed.transforms import Sent, TopK


@record
class ClientState:
    x_bar_i: Tensor  # the server's model, at which the gradient below was taken
    grad_i: Tensor  # gradient of f_i there
    rho_i: Tensor  # the part of gradients that compression did not send; empty with client_k=None


@record
class ServerState:
    x_bar: Tensor  # the model
    g_bar: Tensor  # compressed mean of the gradients at x_bar, in float64
    e: Tensor  # the part of mean gradients that compression did not send, in float64
    asking: Tensor  # whether the next exchange asks for gradients; otherwise for local steps
    first: Tensor  # whether the next gradients are those at x0, which are not compressed


@record
class Down(Broadcast):
    """A request for gradients at ``x_bar``, or for local steps along ``g_bar`` from the ``x_bar`` that clients hold."""

    g_bar: Tensor
    asking: bool
    first: bool


@record
class Message:
    vector_i: Tensor  # x_i - x_bar, or the compressed gradient


@dataclass(frozen=True)
class FedLin(Algorithm[ServerState, ClientState, Message]):
    r"""Local steps corrected by gradients of the same round, in two exchanges (Mitra et al. 2021); all clients.

    .. math::
        x &\leftarrow x - \gamma(\nabla f_i(x) - \nabla f_i(\bar x) + \bar g) \text{ from } \bar x, \quad
        \bar x^+ = \tfrac1n\textstyle\sum_i x_i \\
        h_i &= C_{k_c}(\rho_i + \nabla f_i(\bar x^+)), \quad \rho_i \leftarrow \rho_i + \nabla f_i(\bar x^+) - h_i \\
        \bar g &= C_{k_s}(u), \quad u = e + \tfrac1n\textstyle\sum_i h_i, \quad e \leftarrow u - \bar g

    ``C_k`` keeps the k entries of largest magnitude, the first of equal ones. Clients whose numbers of local steps
    :math:`\tau_i` differ should use step sizes proportional to :math:`1/\tau_i`.

    Args:
        client_k: entries of the gradient that clients send; all if None.
        server_k: entries that the server broadcasts; all if None.

    Reference: arXiv:2102.07053.

    >>> from lightning_fed import GradientDescent, Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # their mean is minimal at 1
    >>> work = GradientDescent(steps=10, lr=0.1)  # with which FedAvg has another limit
    >>> round(float(simulate(FedLin(), clients, rounds=60, solver=work).x_bar), 6)
    1.0
    """

    client_k: int | None = None
    server_k: int | None = None

    def __post_init__(self) -> None:
        whole(self, "client_k", 1, optional=True)
        whole(self, "server_k", 1, optional=True)

    def init_server(self, x0: Tensor) -> ServerState:
        zero = torch.zeros_like(wide(x0))
        return ServerState(x0, zero, zero, asking=torch.tensor(True), first=torch.tensor(True))

    def init_client(self, x0: Tensor) -> ClientState:
        zero = torch.zeros_like(x0)
        return ClientState(x_bar_i=x0, grad_i=zero, rho_i=x0[:0] if self.client_k is None else zero)

    def broadcast(self, server: ServerState, work: LocalWork) -> Down:
        asking, first, none = bool(server.asking), bool(server.first), server.x_bar[:0]
        g_bar = none if asking else server.g_bar.to(server.x_bar.dtype)
        return Down(server.x_bar if asking and not first else none, g_bar, asking, first)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        assert isinstance(down, Down)
        if not down.asking:
            sol = local.solve(client.x_bar_i, linear=down.g_bar - client.grad_i)
            return Reply(client, Message(sol.x - client.x_bar_i), sol.x, sol.loss, sol.steps)
        x_bar = client.x_bar_i if down.first else down.x_bar
        grad_i = local.gradient(x_bar)
        if down.first:
            return Reply(ClientState(x_bar, grad_i, client.rho_i), Message(grad_i), x_bar, gradients=1)
        if self.client_k is None:
            return Reply(ClientState(x_bar, grad_i, client.rho_i), Message(grad_i), x_bar, gradients=1)
        sent = _largest(client.rho_i + grad_i, self.client_k)
        state = ClientState(x_bar, grad_i, client.rho_i + grad_i - sent.value)
        return Reply(state, Message(sent.value), x_bar, bytes_up=sent.bits // 8, gradients=1)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        mean = total.sum.vector_i / total.weight
        if not bool(server.asking):
            x_bar = (wide(server.x_bar) + mean).to(server.x_bar.dtype)
            return ServerState(x_bar, server.g_bar, server.e, torch.tensor(True), torch.tensor(False))
        u = server.e + mean
        g_bar = u if bool(server.first) else _largest(u, self.server_k).value
        return ServerState(server.x_bar, g_bar, u - g_bar, torch.tensor(False), torch.tensor(False))

    def bytes_down(self, down: Broadcast) -> int:
        assert isinstance(down, Down)
        return num_bytes(down.x_bar) + _largest(down.g_bar, self.server_k).bits // 8

    @property
    def traits(self) -> Traits:
        return Traits(everybody=True, full_start=True, exchanges=2)


def _largest(v: Tensor, k: int | None) -> Sent:
    """The ``k`` entries of largest magnitude; all if None."""
    return TopK(k or v.shape[-1])(v, Generator()) if v.numel() else Sent(v, 0)
