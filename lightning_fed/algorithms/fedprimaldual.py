from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Weights, check_g, record, wide
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import DualSteps, Traits
from lightning_fed.core.validation import one_of, positive
from lightning_fed.prox import Prox, Zero


@record
class ClientState:
    z_i: Tensor  # dual variable of x_i = x_bar; never leaves the client


@record
class ServerState:
    x_bar: Tensor  # the model
    z_bar: Tensor  # weighted mean of z_i over all n clients, in float64


@record
class Down(Broadcast):
    tau: Tensor  # planned sum of the step sizes of a visit, a scalar; the same number for all clients


@record
class Message:
    d_i: Tensor  # x_i - x_bar


@dataclass(frozen=True)
class FedPrimalDual(Algorithm[ServerState, ClientState, Message]):
    r"""FedADMM whose local penalty, dual step and server step are three numbers instead of one.

    .. math::
        x_i &\approx \arg\min_x f_i(x) + \langle z_i, x\rangle + \tfrac\rho2\|x - \bar x\|^2
        \;\text{ from } \bar x, \qquad d_i = x_i - \bar x, \quad z_i \leftarrow z_i + \sigma d_i \\
        \bar z &\leftarrow \bar z + \sigma\textstyle\sum_{i\in S} w_i d_i, \qquad
        \bar x \leftarrow \mathrm{prox}_{\lambda g}\Big(\bar x +
        \tfrac{\sum_{i\in S} w_i d_i}{\sum_{i\in S} w_i} + \lambda\bar z\Big)

    Fixed points do not depend on the three steps: :math:`z_i = -\nabla f_i(\bar x)` and
    :math:`\bar z \in \partial g(\bar x)`, so :math:`\bar x` is stationary for :math:`\sum_i w_i f_i + g`.
    A client keeps one vector. Special cases: FedADMM with all clients, and FedDyn
    (:math:`\rho = \sigma = 1/\lambda`), SCAFFOLD (:math:`\rho = 0, \sigma = 1/\lambda = 1/\tau`), FedAvg and FedProx
    (:math:`\sigma \to 0`). docs/primal_dual.md states what is proved and what is not.

    Args:
        rho: local penalty, >= 0.
        a: dual step times the length of a visit, ``sigma = a / tau``. ``tau`` is the planned sum of the step sizes of a
            visit, lr * steps for plain SGD: other optimisers need ``sigma`` and ``lam``.
        b: server step over the length of a visit, ``lam = b * tau``. Stable with ``a * b <= 1`` and equal weights.
        sigma: the dual step itself, instead of ``a``.
        lam: the server step itself, instead of ``b``; also the parameter of the prox.
        g: regulariser or constraint, applied by the server.
        weights: ``uniform`` (1/n) or ``samples`` (N_i / N).

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> algorithm = FedPrimalDual(rho=2.0, sigma=2.0, lam=0.5)
    >>> round(float(simulate(algorithm, clients, rounds=60).x_bar), 6)  # (3 + 1) / (1 + 3)
    1.0
    """

    rho: float = 0.0
    a: float = 0.1
    b: float = 3.0
    sigma: float | None = None
    lam: float | None = None
    g: Prox = Zero()
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        positive(self, "rho", "It weighs |x - x_bar|^2 in local work; 0 is usual.", zero=True)
        positive(self, "a", "It is the dual step times the length of a visit; start from 0.1.")
        positive(self, "b", "It is the server step over the length of a visit; start from 3.")
        if self.sigma is not None:
            positive(self, "sigma", "It is the dual step; start from 0.1 / (lr * steps).")
        if self.lam is not None:
            positive(self, "lam", "It is the server step; start from 3 * lr * steps.")
        check_g(self)
        one_of(self, "weights", ("uniform", "samples"))

    def init_server(self, x0: Tensor) -> ServerState:
        return ServerState(x_bar=x0, z_bar=torch.zeros_like(wide(x0)))

    def init_client(self, x0: Tensor) -> ClientState:
        return ClientState(z_i=torch.zeros_like(x0))

    def broadcast(self, server: ServerState, work: LocalWork) -> Broadcast:
        if not self._plans:
            return Broadcast(server.x_bar)
        if not work.lr_sum > 0:
            raise ValueError(f"{self._why} Here it is {work.lr_sum:g}.")
        return Down(server.x_bar, server.z_bar.new_tensor(work.lr_sum))

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        x_bar = down.x_bar
        sol = local.solve(x_bar, linear=client.z_i, rho=self.rho, center=x_bar)
        d_i = sol.x - x_bar
        z_i = client.z_i + self._sigma(down) * d_i
        return Reply(ClientState(z_i), Message(d_i), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[Message]) -> ServerState:
        lam, D = self._lam(total.down), total.sum.d_i
        z_bar = server.z_bar + self._sigma(total.down) * D / total.population
        x = wide(server.x_bar) + D / total.weight + lam * z_bar
        return ServerState(self.g.prox(x, lam).to(server.x_bar.dtype), z_bar)

    def acknowledge(self, before: ClientState, after: ClientState, arrived: Message, down: Broadcast) -> ClientState:
        return ClientState(before.z_i + self._sigma(down) * arrived.d_i)

    def share(self, client: ClientState) -> Tensor:
        return client.z_i

    def revised(self, server: ServerState, revise: Callable[[Tensor], Tensor]) -> ServerState:
        return ServerState(server.x_bar, revise(server.z_bar))

    @property
    def traits(self) -> Traits:
        requires = {"plain_sgd": self._why} if self._plans else {}
        return Traits(penalty=self.rho, plans_steps=self._plans, requires=requires)

    @property
    def dual_steps(self) -> DualSteps | None:
        """Their product; None if one of them only is given, so that it depends on the length of a visit."""
        if self.sigma is None and self.lam is None:
            return DualSteps(self.a * self.b, rate=self.a)
        if self.sigma is None or self.lam is None:
            return None
        rate = self.sigma / self.rho if self.rho else None
        return DualSteps(self.sigma * self.lam, rate, solved=self.rho > 0)

    @property
    def _plans(self) -> bool:
        """Whether a step depends on the planned length of a visit."""
        return self.sigma is None or self.lam is None

    @property
    def _why(self) -> str:
        return (
            "FedPrimalDual(a, b) takes its dual and server steps from the sum of the local step sizes, which is known"
            " for plain SGD. Give sigma= and lam= for other local work."
        )

    def _sigma(self, down: Broadcast) -> float:
        return self.a / _length(down) if self.sigma is None else self.sigma

    def _lam(self, down: Broadcast) -> float:
        return self.b * _length(down) if self.lam is None else self.lam


def _length(down: Broadcast) -> float:
    assert isinstance(down, Down)
    return float(down.tau)
