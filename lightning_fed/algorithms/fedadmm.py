from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

from lightning_fed.algorithms.fedadmm_paper import PaperADMM
from lightning_fed.algorithms.fedadmm_seen import SeenADMM
from lightning_fed.algorithms.fedprimaldual import FedPrimalDual
from lightning_fed.algorithms.forwarding import Forwarding
from lightning_fed.core.algorithm import Algorithm, Start, Weights, check_g
from lightning_fed.core.traits import DualSteps, Traits
from lightning_fed.core.validation import one_of, positive, shown
from lightning_fed.prox import Prox, Zero

#: Over whom the server averages.
Mean = Literal["all", "seen", "active"]

#: ``eta="auto"`` is this number over the planned sum of the step sizes of a visit.
AUTO: dict[Mean, float] = {"all": 1.0, "seen": 1.0, "active": 0.3}


@dataclass(frozen=True)
class FedADMM(Forwarding):
    r"""Minimise :math:`\sum_i w_i f_i(x) + g(x)` with one dual variable per client (Wang, Marella, Anderson 2022).

    .. math::
        \bar x_i &= \alpha\bar x + (1-\alpha) x_i \\
        x_i &\approx \arg\min_x f_i(x) + \langle z_i, x\rangle + \tfrac\eta2\|x - \bar x_i\|^2 \\
        z_i &\leftarrow z_i + \eta (x_i - \bar x_i), \quad \hat x_i = x_i + z_i/\eta \\
        \tilde x &= \textstyle\sum_i w_i \hat x_i, \quad \bar x \leftarrow \mathrm{prox}_{g/\eta}(\tilde x)

    Clients outside the cohort keep their share of :math:`\tilde x`, so any proper sampling is valid and no
    importance weights are needed. That is ``mean="all"``, the paper's method. Two other means have the same fixed
    points, are the same method when all clients take part, and are faster when only some do:

    - ``seen`` averages :math:`\hat x_i` over the clients that have taken part so far; the paper's theorem holds from
      the round in which the last client is first seen.
    - ``active`` averages the models over the cohort and the duals over all clients,
      :math:`\bar x \leftarrow \mathrm{prox}_{g/\eta}\big(\sum_{i\in S} w_i x_i / \sum_{i\in S} w_i + \bar z/\eta\big)`
      with :math:`\bar z = \sum_i w_i z_i`; a client keeps :math:`z_i` alone. Without a ``g`` it is FedDyn.

    Args:
        eta: penalty, > 0: the larger, the shorter the steps. FedDR's step is ``1 / eta``. ``"auto"`` is 0.3 / tau for
            ``mean="active"`` and 1 / tau otherwise, with tau the planned sum of the step sizes of a visit before
            round 0 (lr * steps); it needs plain SGD.
        alpha: relaxation in (0, 2]; 1 is the paper's method.
        g: regulariser or constraint, applied by the server.
        weights: ``uniform`` (1/n, the paper) or ``samples`` (N_i / N).
        start: local work starts at the ``server`` model, at the client's own last ``local`` model, or at the
            ``centre`` of the quadratic. The paper leaves the start open. ``local`` needs ``lr * steps * eta`` of
            several units in a visit, otherwise x_i does not follow x_bar.
        project_initial: broadcast ``prox(x0)`` instead of ``x0`` in the first round.
        mean: over whom the server averages; ``active`` needs ``start="server"`` and ``alpha=1``.

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x
    >>> round(float(simulate(FedADMM(eta=2.0), clients, rounds=60).x_bar), 6)  # (3 + 1) / (1 + 3)
    1.0

    Reference: arXiv:2203.15104. The relaxed form, the weights and the means ``seen`` and ``active`` are ours.
    """

    eta: float | Literal["auto"] = 1.0
    alpha: float = 1.0
    g: Prox = Zero()
    weights: Weights = "uniform"
    start: Start = "server"
    project_initial: bool = False
    mean: Mean = "all"

    def __post_init__(self) -> None:
        if isinstance(self.eta, str) and self.eta != "auto":
            raise ValueError(f'FedADMM.eta must be a positive number or "auto", got {shown(self.eta)}.')
        if self.eta != "auto":
            positive(self, "eta", 'It weighs |x_i - x_bar|^2; start from 1.0, or from "auto".')
        positive(self, "alpha", "1 is plain FedADMM, below 1 is under-relaxed.", upper=2)
        check_g(self)
        one_of(self, "weights", ("uniform", "samples"))
        one_of(self, "start", ("local", "server", "centre"))
        one_of(self, "project_initial", (True, False))
        one_of(self, "mean", ("all", "seen", "active"))
        for name, wanted in (("start", "server"), ("alpha", 1), ("project_initial", False)):
            if self.mean == "active" and getattr(self, name) != wanted:
                raise ValueError(
                    f'FedADMM(mean="active") needs {name}={wanted!r}, got {getattr(self, name)!r}: its clients keep no'
                    ' model and start at the server\'s. Use mean="seen" or "all" for another.'
                )

    @cached_property
    def inner(self) -> Algorithm[Any, Any, Any]:
        """The method with this mean."""
        if self.eta == "auto":
            raise ValueError(f"{self._why} Run it by Trainer.fit or simulate, which plan it, or give a number.")
        if self.mean == "active":
            return FedPrimalDual(self.eta, sigma=self.eta, lam=1 / self.eta, g=self.g, weights=self.weights)
        paper = PaperADMM(self.eta, self.alpha, self.g, self.weights, self.start, self.project_initial)
        return paper if self.mean == "all" else SeenADMM(paper)

    def planned(self, lr_sum: float) -> FedADMM:
        if self.eta != "auto":
            return self
        if not lr_sum > 0:
            raise ValueError(f"{self._why} Here it is {lr_sum:g}: give eta a number.")
        return replace(self, eta=AUTO[self.mean] / lr_sum)

    def weight(self, num_examples: int) -> float:
        return Algorithm.weight(self, num_examples)  # also before eta is known

    @property
    def acknowledges(self) -> bool:
        return self.mean == "active"

    @property
    def traits(self) -> Traits:
        if self.eta != "auto":
            return self.inner.traits
        like = replace(self, eta=1.0).traits
        return replace(like, penalty=0.0, plans_steps=True, requires={"plain_sgd": self._why})

    @property
    def dual_steps(self) -> DualSteps | None:
        return DualSteps(gain=1.0, rate=1.0, solved=True) if self.mean == "active" else None  # for every eta

    @property
    def _why(self) -> str:
        return (
            'FedADMM(eta="auto") depends on the planned sum of the local step sizes, which is known for plain SGD.'
            " Give eta a number, such as 1.0, or use torch.optim.SGD without momentum."
        )
