from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Weights, check_g, length_of, record, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive
from lightning_fed.prox import Prox, Zero


@record
class ClientState:
    """Empty: clients keep no state."""


@record
class ServerState:
    x_bar: Tensor  # the model
    z: Tensor  # dual variable: x0 minus all gradients so far, in float64
    elapsed: Tensor  # sum of all step sizes so far: the factor of g


@record
class Down(Broadcast):
    """``x_bar`` holds the dual variable here: clients compute the model from it."""

    elapsed: float


@record
class Message:
    delta_i: Tensor  # change of the dual variable
    lr_sum: Tensor  # sum of the local step sizes


@dataclass(frozen=True)
class FedDualAvg(Algorithm[ServerState, ClientState, Message]):
    r"""Federated dual averaging (Yuan et al. 2021): gradients are averaged, and g acts on their sum.

    .. math::
        \zeta \leftarrow \zeta - \gamma\nabla f_i\big(\mathrm{prox}_{\tilde\eta g}(\zeta)\big)
        \text{ from } z, \text{ K times}, \quad z \leftarrow z + \eta_s\,\mathrm{mean}_{i\in S}(\zeta_i - z), \quad
        \bar x = \mathrm{prox}_{\tilde\eta g}(z)

    with :math:`\tilde\eta` the sum of all step sizes so far. Unlike averages of sparse models, x_bar stays sparse.

    Args:
        g: regulariser or constraint.
        server_lr: server step :math:`\eta_s`, > 0.
        weights: ``uniform`` or ``samples``.

    Reference: arXiv:2011.08474.

    >>> from lightning_fed import GradientDescent, Quadratic, simulate
    >>> from lightning_fed.prox import L1
    >>> clients = [Quadratic([[1.0, 0.0], [0.0, 1.0]], b) for b in ([2.0, 0.3], [2.0, -0.1])]  # |x|^2 / 2 - <b, x>
    >>> algorithm, work = FedDualAvg(g=L1(0.5)), GradientDescent(steps=2, lr=0.05)
    >>> x_bar = simulate(algorithm, clients, rounds=200, solver=work).x_bar
    >>> x_bar.round(decimals=2).tolist()  # (2 - 0.5, 0): the second entry is zero exactly
    [1.5, 0.0]
    """

    g: Prox = Zero()
    server_lr: float = 1.0
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        check_g(self)
        positive(self, "server_lr", "1.0 takes the mean of the clients' duals.")
        one_of(self, "weights", ("uniform", "samples"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, z=wide(x0), elapsed=torch.zeros((), dtype=torch.float64))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState()

    def broadcast(self, server: ServerState, work: LocalWork) -> Down:
        return Down(server.z.to(server.x_bar.dtype), float(server.elapsed))

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        assert isinstance(down, Down)
        z, before = down.x_bar, down.elapsed
        sol = local.solve(z, evaluate_at=lambda zeta, elapsed: self._primal(zeta, before + elapsed))
        message = Message(sol.x - z, sol.x.new_tensor(length_of(sol, self)))
        return Reply(client, message, self._primal(sol.x, before + length_of(sol, self)), sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        z = server.z + self.server_lr * total.sum.delta_i / total.weight
        elapsed = server.elapsed + self.server_lr * float(total.sum.lr_sum) / total.weight
        return ServerState(self._primal(z, float(elapsed)).to(server.x_bar.dtype), z, elapsed)

    @property
    def traits(self) -> Traits:
        decay = "FedDualAvg's optimiser moves the dual variable, which must not decay. Use g=SquaredL2(c)."
        plain = "FedDualAvg sums plain gradients in its dual variable."
        return Traits(requires={"plain_sgd": plain, "no_weight_decay": decay})

    def _primal(self, z: Tensor, elapsed: float) -> Tensor:
        return self.g.prox(z, elapsed) if elapsed else z
