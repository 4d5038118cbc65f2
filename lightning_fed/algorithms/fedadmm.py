from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Start, Weights, check_g, record, start_point, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive
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
class FedADMM(Algorithm[ServerState, ClientState, Message]):
    r"""Minimise :math:`\sum_i w_i f_i(x) + g(x)` with one dual variable per client (Wang, Marella, Anderson 2022).

    .. math::
        \bar x_i &= \alpha\bar x + (1-\alpha) x_i \\
        x_i &\approx \arg\min_x f_i(x) + \langle z_i, x\rangle + \tfrac\eta2\|x - \bar x_i\|^2 \\
        z_i &\leftarrow z_i + \eta (x_i - \bar x_i), \quad \hat x_i = x_i + z_i/\eta \\
        \tilde x &= \textstyle\sum_i w_i \hat x_i, \quad \bar x \leftarrow \mathrm{prox}_{g/\eta}(\tilde x)

    Clients outside the cohort keep their share of :math:`\tilde x`, so any proper sampling is valid and no
    importance weights are needed.

    Args:
        eta: penalty, > 0: the larger, the shorter the steps. FedDR's step is ``1 / eta``.
        alpha: relaxation in (0, 2]; 1 is the paper's method.
        g: regulariser or constraint, applied by the server.
        weights: ``uniform`` (1/n, the paper) or ``samples`` (N_i / N).
        start: local work starts at the ``server`` model, at the client's own last ``local`` model, or at the
            ``centre`` of the quadratic. The paper leaves the start open. ``local`` needs ``lr * steps * eta`` of
            several units in a visit, otherwise x_i does not follow x_bar.
        project_initial: broadcast ``prox(x0)`` instead of ``x0`` in the first round.

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> round(float(simulate(FedADMM(eta=2.0), clients, rounds=60).x_bar), 6)  # (3 + 1) / (1 + 3)
    1.0

    Reference: arXiv:2203.15104. The relaxed form and the weights are ours.
    """

    eta: float = 1.0
    alpha: float = 1.0
    g: Prox = Zero()
    weights: Weights = "uniform"
    start: Start = "server"
    project_initial: bool = False

    def __post_init__(self) -> None:
        positive(self, "eta", "It weighs |x_i - x_bar|^2; start from 1.0.")
        positive(self, "alpha", "1 is plain FedADMM, below 1 is under-relaxed.", upper=2)
        check_g(self)
        one_of(self, "weights", ("uniform", "samples"))
        one_of(self, "start", ("local", "server", "centre"))
        one_of(self, "project_initial", (True, False))

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

    @property
    def traits(self) -> Traits:
        return Traits(penalty=self.eta, relaxation=self.alpha, sends_changes=True)
