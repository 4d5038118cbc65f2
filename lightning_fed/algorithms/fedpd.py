from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, num_bytes, record, start_point, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive, whole


@record
class ClientState:
    x_i: Tensor  # local model
    lam_i: Tensor  # dual variable of x_i = x_0i
    v_i: Tensor  # estimate of the gradient of f_i at x_i; empty with oracle I
    eta_hat: Tensor  # step of its last visit, a scalar: a resumed run may use another step

    @property
    def x_0i(self) -> Tensor:
        """This client's copy of the consensus, from which it continues after a round without an exchange."""
        return self.x_i + self.lam_i * self.eta_hat.unsqueeze(-1).to(self.lam_i.dtype)


@record
class ServerState:
    x_bar: Tensor  # the model, as of the last exchange
    round: Tensor  # number of rounds so far
    exchanged: Tensor  # whether the last round ended with an exchange


@record
class Down(Broadcast):
    """``x_bar`` is empty after a round without an exchange: clients continue from their own copies."""

    exchanged: bool
    exchange: bool  # whether this round ends with an exchange
    refresh: bool  # whether oracle II starts from a full gradient
    bytes: int  # size of the mean that ends this round: 0 without an exchange


@record
class Message:
    x_0i: Tensor  # empty in a round without an exchange


@dataclass(frozen=True)
class FedPD(Algorithm[ServerState, ClientState, Message]):
    r"""Primal-dual method in which all clients communicate, but only in some rounds (Zhang et al. 2020).

    .. math::
        x_i &\approx \arg\min_x f_i(x) + \langle\lambda_i, x\rangle + \tfrac1{2\hat\eta}\|x - x_{0,i}\|^2 \\
        \lambda_i &\leftarrow \lambda_i + (x_i - x_{0,i})/\hat\eta, \quad x_{0,i}^+ = x_i + \hat\eta\lambda_i

    One coin is drawn per round: with probability ``1 - skip`` all clients send :math:`x_{0,i}^+` and continue from the
    mean; otherwise each continues from its own copy. Without skipping this is ``FedADMM(eta=1/eta_hat, start="local")``
    with all clients.

    Oracle II takes its steps along an estimate of the gradient, which every batch :math:`B` updates by the difference
    of its gradients at the two ends of the step, and which is reset to a full gradient every ``refresh_every`` rounds:

    .. math::
        x^+ = \arg\min_x \langle v_i + \lambda_i, x\rangle + \tfrac1{2\hat\eta}\|x - x_{0,i}\|^2
        + \tfrac1{2\gamma}\|x - x_i\|^2, \quad v_i \leftarrow v_i + \nabla f_i(x^+; B) - \nabla f_i(x_i; B)

    which is a gradient step of length :math:`\gamma\hat\eta/(\gamma + \hat\eta)`, the learning rate.

    Args:
        eta_hat: step of the prox, > 0.
        skip: probability in [0, 1) of a round without an exchange.
        start: local work starts at the ``local`` model, the ``server``'s (here the client's x_0i), or the ``centre``.
        seed: seed of the coins.
        oracle: solver of local problems: ``I`` any solver, ``II`` plain gradient steps with variance reduction.
        refresh_every: rounds from one full gradient of oracle II to the next.

    Reference: arXiv:2005.11418.

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # their mean is minimal at 1
    >>> round(float(simulate(FedPD(eta_hat=0.5), clients, rounds=60).x_bar), 6)
    1.0
    >>> algorithm = FedPD(eta_hat=0.5, skip=0.5)
    >>> states = simulate(algorithm, clients, rounds=20).server
    >>> moved = [bool(after.x_bar != before.x_bar) for before, after in zip(states, states[1:])]
    >>> moved == [algorithm.exchanges(round) for round in range(20)]  # the server's model moves by exchanges alone
    True
    """

    eta_hat: float = 1.0
    skip: float = 0.0
    start: Start = "local"
    seed: int = 0
    oracle: Literal["I", "II"] = "I"
    refresh_every: int = 10

    def __post_init__(self) -> None:
        positive(self, "eta_hat", "It is the step of the local prox, FedADMM's 1/eta; start from 1.0.")
        positive(self, "skip", "It is the probability of a round without an exchange.", zero=True)
        if self.skip >= 1:
            raise ValueError(f"FedPD.skip must stay below 1, got {self.skip!r}: no round would have an exchange.")
        one_of(self, "start", ("local", "server", "centre"))
        whole(self, "seed")
        one_of(self, "oracle", ("I", "II"))
        whole(self, "refresh_every", 1)
        if self.oracle == "II" and self.start != "local":
            raise ValueError(
                f'FedPD.start must be local with oracle="II", got {self.start!r}: the estimate of the gradient is that'
                " at the client's own model."
            )

    def exchanges(self, round: int) -> bool:
        """Draw this round's coin: whether the round ends with an exchange."""
        return bool(numpy_generator(self.seed, round, "FedPD").random() >= self.skip)

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, round=torch.tensor(0), exchanged=torch.tensor(True))

    def init_client(self, x0: Tensor) -> ClientState:
        v_i = torch.zeros_like(x0) if self.oracle == "II" else x0[:0]
        eta_hat = torch.full((), self.eta_hat, dtype=wide(x0[:0]).dtype, device=x0.device)
        return ClientState(x_i=x0, lam_i=torch.zeros_like(x0), v_i=v_i, eta_hat=eta_hat)

    def broadcast(self, server: ServerState, work: LocalWork) -> Down:
        exchanged, round = bool(server.exchanged), int(server.round)
        exchange, refresh = self.exchanges(round), self.oracle == "II" and round % self.refresh_every == 0
        x_bar = server.x_bar if exchanged else server.x_bar[:0]
        return Down(x_bar, exchanged, exchange, refresh, num_bytes(server.x_bar) if exchange else 0)

    def bytes_down(self, down: Broadcast) -> int:
        assert isinstance(down, Down)
        return down.bytes  # bill the mean to the round that made it, though the next broadcast carries it

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        assert isinstance(down, Down)
        x_0i = down.x_bar if down.exchanged else client.x_0i
        own = client.x_i
        start = start_point(self.start, own=own, server=x_0i, centre=lambda: x_0i - self.eta_hat * client.lam_i)
        ask = partial(local.solve, start, linear=client.lam_i, rho=1 / self.eta_hat, center=x_0i)
        refresh = self.oracle == "II" and bool(down.refresh)
        sol = ask() if self.oracle == "I" else ask(estimate=local.gradient(start) if refresh else client.v_i)
        lam_i = client.lam_i + (sol.x - x_0i) / self.eta_hat
        v_i = client.v_i if sol.estimate is None else sol.estimate
        state = ClientState(sol.x, lam_i, v_i, torch.full_like(client.eta_hat, self.eta_hat))
        message = Message(state.x_0i if down.exchange else lam_i[..., :0])
        return Reply(state, message, sol.x, sol.loss, sol.steps, gradients=int(refresh))

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        exchange = self.exchanges(int(server.round))
        x_bar = (total.sum.x_0i / total.weight).to(server.x_bar.dtype) if exchange else server.x_bar
        return ServerState(x_bar, server.round + 1, torch.tensor(exchange))

    @property
    def traits(self) -> Traits:
        why = 'FedPD(oracle="II") minimises a linearised model, which is a gradient step. Use oracle="I".'
        requires = {"plain_sgd": why} if self.oracle == "II" else {}
        return Traits(penalty=1 / self.eta_hat, relaxation=1.0, requires=requires, everybody=True)
