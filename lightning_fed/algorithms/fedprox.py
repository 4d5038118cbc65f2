from __future__ import annotations

from dataclasses import dataclass

from lightning_fed.algorithms.fedavg import ClientState, FedAvg, Message
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.problem import Local
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import positive


@dataclass(frozen=True)
class FedProx(FedAvg):
    r"""FedAvg with a penalty that keeps local models near the server's model (Li et al. 2020).

    .. math::
        x_i \approx \arg\min_x f_i(x) + \tfrac\mu2\|x - \bar x\|^2 \text{ from } \bar x

    Args:
        mu: penalty of the distance to the server's model, >= 0; published grid 0.001, 0.01, 0.1, 0.5, 1. 0 is FedAvg.
        server_lr: server step, as in :class:`FedAvg`.
        weights: ``samples`` or ``uniform``, as in :class:`FedAvg`.
        stragglers: fraction in [0, 1] of clients that finish only a random part of their local work; the server
            averages their models too, while :class:`FedAvg` drops the replies of the same clients.

    Reference: arXiv:1812.06127 (sampling and weighting as in its public code).

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> round(float(simulate(FedProx(mu=1.0), clients, rounds=1).x_bar), 6)  # mean of b / (a + mu): 3/2 and 1/4
    0.875
    """

    mu: float = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "mu", "It weighs |x - x_bar|^2; 0 is FedAvg.", zero=True)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        sol = local.solve(down.x_bar, rho=self.mu, center=down.x_bar, work=self.work_done(local))
        return Reply(client, Message(sol.x - down.x_bar), sol.x, sol.loss, sol.steps)

    @property
    def traits(self) -> Traits:
        return Traits(penalty=self.mu)
