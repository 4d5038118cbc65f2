from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, Weights, check_g, record, start_point, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive
from lightning_fed.prox import Prox, Zero


@record
class ClientState:
    x_i: Tensor  # local model
    y_i: Tensor  # Douglas-Rachford variable: the point the local prox is taken at

    @property
    def x_hat_i(self) -> Tensor:
        """This client's share of x_tilde, as the server last summed it."""
        return 2 * self.x_i - self.y_i


@record
class ServerState:
    x_bar: Tensor  # the model
    x_tilde: Tensor  # weighted mean of x_hat_i over all n clients, in float64


@record
class Message:
    delta_i: Tensor  # change of x_hat_i


@dataclass(frozen=True)
class FedDR(Algorithm[ServerState, ClientState, Message]):
    r"""Randomised Douglas-Rachford splitting for :math:`\sum_i w_i f_i(x) + g(x)` (Tran-Dinh et al. 2021).

    .. math::
        y_i &\leftarrow y_i + \alpha(\bar x - x_i) \\
        x_i &\approx \mathrm{prox}_{\hat\eta f_i}(y_i), \quad \hat x_i = 2x_i - y_i \\
        \tilde x &= \textstyle\sum_i w_i \hat x_i, \quad \bar x \leftarrow \mathrm{prox}_{\hat\eta g}(\tilde x)

    With the same start rule, ``FedDR(eta_hat=1/eta, alpha)`` is ``FedADMM(eta, alpha)`` in other variables.

    Args:
        eta_hat: step of the prox, > 0: the larger, the *longer* the steps (the inverse of FedADMM's ``eta``).
        alpha: relaxation in (0, 2]; 1 is Douglas-Rachford, 2 Peaceman-Rachford.
        g: regulariser or constraint, applied by the server.
        weights: ``uniform`` (1/n) or ``samples`` (N_i / N).
        start: local work starts at the ``server`` model, the client's ``local`` model, or the ``centre`` y_i. The
            authors' code starts at ``local``, which needs ``lr * steps / eta_hat`` of several units in a visit.
        init: ``x0`` starts all variables at the first model. ``prox`` asks every client once before round 0, as in
            the paper, and also adds their replies to x_tilde; the paper omits them, which makes its limit wrong.

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]
    >>> round(float(simulate(FedDR(eta_hat=0.5), clients, rounds=60).x_bar), 6)
    1.0

    Reference: arXiv:2103.03452.
    """

    eta_hat: float = 1.0
    alpha: float = 1.0
    g: Prox = Zero()
    weights: Weights = "uniform"
    start: Start = "server"
    init: Literal["x0", "prox"] = "x0"

    def __post_init__(self) -> None:
        positive(self, "eta_hat", "It is the step of the local prox, FedADMM's 1/eta; start from 1.0.")
        positive(self, "alpha", "1 is Douglas-Rachford, 2 Peaceman-Rachford.", upper=2)
        check_g(self)
        one_of(self, "weights", ("uniform", "samples"))
        one_of(self, "start", ("local", "server", "centre"))
        one_of(self, "init", ("x0", "prox"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, x_tilde=wide(x0))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(x_i=x0, y_i=x0)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        y_i = client.y_i + self.alpha * (down.x_bar - client.x_i)
        start = start_point(self.start, own=client.x_i, server=down.x_bar, centre=lambda: y_i)
        sol = local.solve(start, rho=1 / self.eta_hat, center=y_i)
        state = ClientState(sol.x, y_i)
        return Reply(state, Message(state.x_hat_i - client.x_hat_i), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        x_tilde = server.x_tilde + total.sum.delta_i / total.population
        return ServerState(self.g.prox(x_tilde, self.eta_hat).to(server.x_bar.dtype), x_tilde)

    @property
    def traits(self) -> Traits:
        first = self.init == "prox"
        return Traits(penalty=1 / self.eta_hat, relaxation=self.alpha, full_start=first, sends_changes=True)
