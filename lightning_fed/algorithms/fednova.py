from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from lightning_fed.algorithms import fedavg
from lightning_fed.algorithms.fedavg import ClientState, FedAvg, ServerState
from lightning_fed.core.algorithm import record, wide
from lightning_fed.core.messages import Broadcast, Reply, Total
from lightning_fed.core.problem import Local, Solution
from lightning_fed.core.traits import Traits
from lightning_fed.core.validation import one_of, positive


@record
class Message(fedavg.Message):
    """``delta_i`` is the change per unit of length, (x_i - x_bar) / (gamma |a_i|_1): minus a mean gradient."""

    length_i: Tensor  # gamma tau_i, or gamma |a_i|_1


@dataclass(frozen=True, kw_only=True)
class FedNova(FedAvg):
    r"""FedAvg that weighs clients by their data alone, however many local steps they take (Wang et al. 2020).

    SGD with step size :math:`\gamma` ends at :math:`x_i - \bar x = -\gamma\sum_k a_{i,k} g_{i,k}`: its gradients
    weighted by a vector :math:`a_i` that follows from the number of steps :math:`\tau_i` alone. FedNova averages

    .. math::
        d_i = \frac{\bar x - x_i}{\gamma\|a_i\|_1}, \qquad
        \bar x \leftarrow \bar x - \eta_s\, \gamma\tau_\text{eff} \textstyle\sum_{i\in S} p_i d_i, \qquad
        \tau_\text{eff} = \textstyle\sum_{i\in S} p_i \tau_i

    with weights :math:`p_i` that sum to 1 over the cohort. Gradients have equal weights without momentum,
    :math:`\|a_i\|_1 = \tau_i`; with the optimiser's momentum :math:`\beta` (its buffers start every visit at zero)
    :math:`a_{i,k} = (1-\beta^{\tau_i-k})/(1-\beta)`; with the penalty
    :math:`a_{i,k} = (1-\gamma\mu)^{\tau_i-1-k}` for :math:`k = 0 \ldots \tau_i - 1`. If a scheduler changes step size
    or momentum between local steps, :math:`\gamma\|a_i\|_1` and :math:`\gamma\tau_i` are the sums that follow from the
    same recursion.

    FedAvg's fixed point weighs client i by :math:`p_i\|a_i\|_1` ("objective inconsistency"); here only the error of
    order :math:`\gamma` remains that every such method has. The paper leaves :math:`\tau_\text{eff}` free. Its authors'
    code takes :math:`\sum p_i\tau_i` with a penalty (here ``steps``) and :math:`\sum p_i\|a_i\|_1` otherwise
    (``norm``), which are equal without penalty and momentum. Its server momentum ``gmf`` is left out.

    Args:
        mu: penalty of the distance to the server's model, >= 0, with :math:`\gamma\mu \le 1`; only for plain SGD.
        tau_eff: ``steps``, or ``norm``, with which equal numbers of steps give FedAvg or FedProx.
        server_lr: server step :math:`\eta_s`, > 0.
        weights: p_i proportional to ``samples`` (as in the paper), or ``uniform``.
        stragglers: fraction in [0, 1] of clients that finish only a random part of their local work, all of which
            is averaged; the same clients as in :class:`FedProx`.

    Reference: arXiv:2007.07481.

    >>> from lightning_fed import GradientDescent, Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 0.0), Quadratic.scalar(1.0, 1.0)]  # minimisers 0 and 1: their mean has 1/2
    >>> work = [GradientDescent(9, 0.003), GradientDescent(1, 0.003)]  # nine steps and one step
    >>> [round(float(simulate(a, clients, rounds=600, solver=work).x_bar), 2) for a in (FedAvg(), FedNova())]
    [0.1, 0.5]
    """

    mu: float = 0.0
    tau_eff: Literal["steps", "norm"] = "steps"

    def __post_init__(self) -> None:
        super().__post_init__()
        positive(self, "mu", "It weighs |x - x_bar|^2; 0 for none.", zero=True)
        one_of(self, "tau_eff", ("steps", "norm"))

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, fedavg.Message]:
        x_bar = down.x_bar
        sol = local.solve(x_bar, rho=self.mu, center=x_bar, work=self.work_done(local))
        norm = self._norm(sol)
        delta_i = (sol.x - x_bar) / norm if norm else torch.zeros_like(sol.x)
        length_i = sol.x.new_tensor(sol.lr_sum if self.tau_eff == "steps" else norm)
        return Reply(client, Message(delta_i, length_i), sol.x, sol.loss, sol.steps)

    def server_step(self, server: ServerState, total: Total[fedavg.Message]) -> ServerState:
        assert isinstance(total.sum, Message)
        length = float(total.sum.length_i) / total.weight
        x_bar = wide(server.x_bar) + self.server_lr * length * total.sum.delta_i / total.weight
        return ServerState(x_bar.to(server.x_bar.dtype))

    def _norm(self, sol: Solution) -> float:
        r""":math:`\gamma\|a_i\|_1` of the visit."""
        if sol.reach != sol.reach:
            raise ValueError(
                "FedNova needs local steps of SGD whose weights a_i are known and not negative: with one learning rate"
                f" of at most 1 / mu, got mu={self.mu:g}."
            )
        return sol.reach

    @property
    def traits(self) -> Traits:
        why = "FedNova divides by the length of the local steps"
        plain = {"plain_sgd": f"{why}, which it knows with mu > 0 only for plain SGD. Use mu=0, or no momentum."}
        return Traits(penalty=self.mu, requires=plain if self.mu else {"sgd": f"{why}, which it knows only for SGD."})
