from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Weights, check_g, length_of, record, wide
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


@record
class Message:
    delta_i: Tensor  # y_i - x_bar
    lr_sum: Tensor  # sum of the local step sizes


@dataclass(frozen=True)
class FedMid(Algorithm[ServerState, ClientState, Message]):
    r"""Local proximal gradient steps, averaged (federated mirror descent; Yuan et al. 2021).

    .. math::
        y \leftarrow \mathrm{prox}_{\gamma g}(y - \gamma\nabla f_i(y)) \text{ from } \bar x, \text{ K times}, \quad
        \bar x \leftarrow
        \mathrm{prox}_{\eta_s\gamma K g}\big(\bar x + \eta_s\,\mathrm{mean}_{i\in S}(y_i - \bar x)\big)

    The prox acts twice in a round, at the clients and at the server: with one client and one step this is *not* the
    proximal gradient method, except for constraints. Averages of sparse models are not sparse; see ``FedDualAvg``.

    Args:
        g: regulariser or constraint, applied by clients in every step and by the server.
        server_lr: server step :math:`\eta_s`, > 0.
        weights: ``uniform`` or ``samples``.

    Reference: arXiv:2011.08474.

    >>> from lightning_fed import GradientDescent, Quadratic, simulate
    >>> from lightning_fed.prox import Box
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> work = GradientDescent(steps=1, lr=0.25)  # from 0 to 0.75 and 0.25, of which the first is cut to 0.5
    >>> float(simulate(FedMid(g=Box(-0.5, 0.5)), clients, rounds=1, solver=work).x_bar)
    0.375
    """

    g: Prox = Zero()
    server_lr: float = 1.0
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        check_g(self)
        positive(self, "server_lr", "1.0 takes the mean of the local models.")
        one_of(self, "weights", ("uniform", "samples"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0)

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState()

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        sol = local.solve(down.x_bar, after_step=self.g.prox)
        message = Message(sol.x - down.x_bar, sol.x.new_tensor(length_of(sol, self)))
        return Reply(client, message, sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        moved = wide(server.x_bar) + self.server_lr * total.sum.delta_i / total.weight
        t = self.server_lr * float(total.sum.lr_sum) / total.weight
        return ServerState(self.g.prox(moved, t).to(server.x_bar.dtype))

    @property
    def traits(self) -> Traits:
        return Traits(requires={"plain_sgd": "FedMid takes the prox of g for the length of an SGD step."})
