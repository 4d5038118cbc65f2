from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Weights, length_of, record, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local, Solution
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive


@record
class ClientState:
    c_i: Tensor  # control variate: an estimate of the gradient of f_i


@record
class ServerState:
    x_bar: Tensor  # the model
    c: Tensor  # weighted mean of c_i over all n clients, in float64


@record
class Down(Broadcast):
    c: Tensor
    tau: Tensor  # planned sum of the step sizes of a visit, a scalar; empty if clients send c_delta_i


@record
class Message:
    delta_i: Tensor  # y_i - x_bar
    c_delta_i: Tensor  # change of c_i; empty if the server computes it from delta_i


@dataclass(frozen=True)
class Scaffold(Algorithm[ServerState, ClientState, Message]):
    r"""Local steps corrected by control variates (Karimireddy et al. 2020).

    .. math::
        y &\leftarrow y - \gamma_k(\nabla f_i(y) - c_i + c) \text{ from } \bar x, \text{ K times} \\
        c_i^+ &= \nabla f_i(\bar x) \;\text{(option 1)} \quad\text{or}\quad
        c_i - c + (\bar x - y)/\textstyle\sum_k\gamma_k \;\text{(option 2)} \\
        \bar x &\leftarrow \bar x + \eta_g\tfrac{\sum_{i\in S} w_i(y_i - \bar x)}{\sum_{i\in S} w_i}, \quad
        c \leftarrow c + \textstyle\sum_{i\in S} w_i(c_i^+ - c_i)

    Args:
        option: 1 takes an extra gradient over the client's data; 2 computes it from the local steps at no cost, which
            is valid for plain SGD only: other optimisers are refused.
        server_lr: server step :math:`\eta_g`, > 0.
        weights: ``uniform`` (1/n, the paper) or ``samples`` (N_i / N).
        vectors: number of vectors that a client sends. 2 is the paper's protocol. With option 2 the change of c_i is
            :math:`-c - (y_i - \bar x)/\tau`; if all visits have the same sum :math:`\tau` of step sizes, the server
            computes it from the first vector, and 1 vector gives the same iterates with half of the upload.

    Reference: arXiv:1910.06378. The weights ``samples`` and ``vectors=1`` are ours.

    >>> from lightning_fed import GradientDescent, Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # their mean is minimal at 1
    >>> work = GradientDescent(steps=10, lr=0.1)  # with which FedAvg has another limit
    >>> found = simulate(Scaffold(), clients, rounds=60, solver=work)
    >>> round(float(found.x_bar), 6), [round(float(client.c_i), 6) for client in found.clients[-1]]  # gradients a x - b
    (1.0, [-2.0, 2.0])
    """

    option: Literal[1, 2] = 2
    server_lr: float = 1.0
    weights: Weights = "uniform"
    vectors: Literal[1, 2] = 2

    def __post_init__(self) -> None:
        for name in ("option", "vectors"):
            if (value := getattr(self, name)) not in (1, 2) or isinstance(value, bool):
                raise ValueError(f"Scaffold.{name} must be 1 or 2, got {value!r}.")
        if self.vectors == 1 and self.option == 1:
            raise ValueError("Scaffold(vectors=1) needs option=2: the server cannot compute a client's own gradient.")
        positive(self, "server_lr", "1.0 takes the mean of the local models.")
        one_of(self, "weights", ("uniform", "samples"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, c=torch.zeros_like(wide(x0)))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(c_i=torch.zeros_like(x0))

    def broadcast(self, server: ServerState, work: LocalWork) -> Down:
        tau = server.c.new_tensor([] if self.vectors == 2 else work.lr_sum)
        return Down(server.x_bar, server.c.to(server.x_bar.dtype), tau)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        assert isinstance(down, Down)
        fresh = local.gradient(down.x_bar) if self.option == 1 else None
        sol = local.solve(down.x_bar, linear=down.c - client.c_i)
        c_i = self._off_the_steps(client, down, sol) if fresh is None else fresh
        c_delta_i = c_i - client.c_i if self.vectors == 2 else c_i[..., :0]
        message = Message(sol.x - down.x_bar, c_delta_i)
        return Reply(ClientState(c_i), message, sol.x, sol.loss, sol.steps, gradients=int(fresh is not None))

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        x_bar = wide(server.x_bar) + self.server_lr * total.sum.delta_i / total.weight
        change = total.sum.c_delta_i if self.vectors == 2 else self._changes(total)
        return ServerState(x_bar.to(server.x_bar.dtype), server.c + change / total.population)

    def acknowledge(self, before: ClientState, after: ClientState, arrived: Message, down: Broadcast) -> ClientState:
        assert isinstance(down, Down)
        change = arrived.c_delta_i if self.vectors == 2 else _change(arrived.delta_i, down)
        return ClientState(c_i=before.c_i + change)

    def _off_the_steps(self, client: ClientState, down: Down, sol: Solution) -> Tensor:
        length = length_of(sol, self)
        if self.vectors == 1:
            self._check_length(length, float(down.tau))
            return client.c_i + _change(sol.x - down.x_bar, down)
        return client.c_i - down.c + (down.x_bar - sol.x) / length if length else client.c_i

    def _check_length(self, length: float, planned: float) -> None:
        if not math.isclose(length, planned, rel_tol=1e-9):
            raise ValueError(
                f"Scaffold(vectors=1) needs visits of equal length: the step sizes of this one sum to {length:g}, not"
                f" to the planned {planned:g}. Use local_steps instead of local_epochs, or vectors=2."
            )

    def _changes(self, total: Total[Message]) -> Tensor:
        """Sum of w_i * c_delta_i over the cohort, computed from the sum of the models' changes."""
        assert isinstance(total.down, Down)
        return -total.weight * wide(total.down.c) - total.sum.delta_i / float(total.down.tau)

    def share(self, client: ClientState) -> Tensor:
        return client.c_i

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        return ServerState(server.x_bar, revise(server.c))

    @property
    def traits(self) -> Traits:
        why = "Scaffold(option=2) computes gradients from the local steps. Use option=1."
        return Traits(requires={"plain_sgd": why} if self.option == 2 else {}, plans_steps=self.vectors == 1)


def _change(delta_i: Tensor, down: Down) -> Tensor:
    """The change of c_i that belongs to a change ``delta_i`` of the model in option 2."""
    return -down.c - delta_i / float(down.tau)
