from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, check_g, record, start_point, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive
from lightning_fed.prox import Prox, Zero


@record
class ClientState:
    x_i: Tensor  # local model
    w_i: Tensor  # x_i - y_i in FedDR's letters: the scaled dual variable
    uploaded: Tensor  # the share as last uploaded; the client may have worked since. Empty with mode="fresh"

    @property
    def x_hat_i(self) -> Tensor:
        """This client's share of x_tilde, as last uploaded."""
        return self.uploaded if self.uploaded.shape[-1] else self.x_i + self.w_i


@record
class ServerState:
    x_bar: Tensor  # the model
    x_tilde: Tensor  # mean of the uploaded x_hat_i over all n clients, in float64
    working: Tensor  # whether clients work in the next exchange; otherwise they upload


@record
class Down(Broadcast):
    """``x_bar`` is empty in an exchange in which clients only upload."""

    work: bool


@record
class Message:
    delta_i: Tensor  # change of x_hat_i; empty in an exchange without uploads


@dataclass(frozen=True)
class FedDRII(Algorithm[ServerState, ClientState, Message]):
    r"""FedDR in the variable :math:`w_i = x_i - y_i`, the step between FedDR and FedADMM.

    .. math::
        x_i \approx \mathrm{prox}_{\hat\eta f_i}(\bar x - w_i), \quad w_i \leftarrow w_i + x_i - \bar x, \quad
        \hat x_i = x_i + w_i \\
        \bar x \leftarrow \mathrm{prox}_{\hat\eta g}\big(\tfrac1n\textstyle\sum_i \hat x_i\big)

    Args:
        eta_hat: step of the prox, > 0.
        g: regulariser or constraint, applied by the server.
        mode: with ``fresh``, clients upload after their work, which is FedDR with alpha = 1. ``upload_first`` is the
            protocol of the paper: clients upload the share of their last visit, receive the new mean, work, and keep
            the result until they are drawn again. With partial cohorts that is another, delayed method.
        start: local work starts at the ``server`` model, the ``local`` one, or the ``centre`` of the prox.

    Reference: arXiv:2203.15104.

    >>> from lightning_fed import Quadratic, simulate
    >>> from lightning_fed.algorithms import FedDR
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> methods = FedDRII(eta_hat=0.5), FedDR(eta_hat=0.5)
    >>> [round(float(simulate(method, clients, cohorts=[[0], [1], [0]]).x_bar), 6) for method in methods]
    [1.116667, 1.116667]
    """

    eta_hat: float = 1.0
    g: Prox = Zero()
    mode: Literal["fresh", "upload_first"] = "fresh"
    start: Start = "server"

    def __post_init__(self) -> None:
        positive(self, "eta_hat", "It is the step of the local prox, FedADMM's 1/eta; start from 1.0.")
        check_g(self)
        one_of(self, "mode", ("fresh", "upload_first"))
        one_of(self, "start", ("local", "server", "centre"))

    def init_server(self, x0: Tensor) -> ServerState:
        working = torch.tensor(self.mode == "fresh")
        return ServerState(self.g.prox(wide(x0), self.eta_hat).to(x0.dtype), wide(x0), working)

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(x_i=x0, w_i=torch.zeros_like(x0), uploaded=x0[:0] if self.mode == "fresh" else x0)

    def broadcast(self, server: ServerState, work: LocalWork) -> Down:
        working = bool(server.working)
        return Down(server.x_bar if working else server.x_bar[:0], working)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        assert isinstance(down, Down)
        if not down.work:
            state = ClientState(client.x_i, client.w_i, client.x_i + client.w_i)
            return Reply(state, Message(state.x_hat_i - client.x_hat_i), client.x_i)
        centre = down.x_bar - client.w_i
        start = start_point(self.start, own=client.x_i, server=down.x_bar, centre=lambda: centre)
        sol = local.solve(start, rho=1 / self.eta_hat, center=centre)
        w_i = client.w_i + sol.x - down.x_bar
        state = ClientState(sol.x, w_i, client.uploaded)
        delta_i = state.x_hat_i - client.x_hat_i if self.mode == "fresh" else w_i[..., :0]
        return Reply(state, Message(delta_i), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        if self.mode == "upload_first" and bool(server.working):
            return ServerState(server.x_bar, server.x_tilde, torch.tensor(False))
        x_tilde = server.x_tilde + total.sum.delta_i / total.population
        return ServerState(self.g.prox(x_tilde, self.eta_hat).to(server.x_bar.dtype), x_tilde, torch.tensor(True))

    def share(self, client: ClientState) -> Tensor:
        return client.x_hat_i

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        x_tilde = revise(server.x_tilde)
        return ServerState(self.g.prox(x_tilde, self.eta_hat).to(server.x_bar.dtype), x_tilde, server.working)

    @property
    def traits(self) -> Traits:
        exchanges = 2 if self.mode == "upload_first" else 1
        return Traits(penalty=1 / self.eta_hat, relaxation=1.0, exchanges=exchanges, sends_changes=True)
