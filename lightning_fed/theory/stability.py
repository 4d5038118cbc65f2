r"""How large dual and server steps of a primal-dual method may be under a run's sampling and weights.

With dual step :math:`\sigma`, server step :math:`\lambda` and visits of length :math:`\tau` let :math:`a = \sigma\tau`,
:math:`b = \lambda/\tau`, so that :math:`ab = \sigma\lambda`. If everybody takes part, :math:`ab < 2(1-a)` is enough on
quadratics. Sampling adds variance, and a client that is heavy but seldom drawn bounds ab. ``docs/primal_dual.md`` has
the theorems and says what is proved: the limit is the exact one for one stiff client among flat ones, which is the
worst case found, not the worst case proved.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from lightning_fed.core.traits import DualSteps
from lightning_fed.sampling import Sampler, Systematic
from lightning_fed.theory.cohort_weight import Vector, cohort_weight, normalised
from lightning_fed.theory.coverage import SLACK, Theorem, ceiling_of, theorem_for

#: The safe share of the limit, which is not proved to be the worst case.
SAFE_SHARE = 0.5


def g_star(p: float, c: float) -> float:
    r"""Largest gain :math:`g = abw` of a stiff client of probability p and share :math:`c = w/W` of its cohorts.

    .. math:: g^*(p, c) = \frac{p\,c(2-c)}{1-p+pc/2}

    Beyond it the second moment of one stiff client among flat ones grows.

    >>> g_star(1.0, 1.0), round(30 * g_star(1 / 30, 1.0), 3)
    (2.0, 1.017)
    """
    for name, value in (("p", p), ("c", c)):
        if not 0 < value <= 1:
            raise ValueError(f"{name} must be a number in (0, 1], got {value!r}.")
    return p * c * (2 - c) / (1 - p + p * c / 2)


def equal_weights_limit(size: int, n: int) -> float:
    r"""The limit on ab for equal weights and ``size`` of ``n`` clients: :math:`(2-1/S)/(1-(S-\frac12)/n)`.

    >>> [round(equal_weights_limit(size, 30), 3) for size in (1, 3, 10)]
    [1.017, 1.818, 2.78]
    """
    if not 1 <= size <= n:
        raise ValueError(f"size must lie in 1 to n = {n}, got {size!r}.")
    return (2 - 1 / size) / (1 - (size - 0.5) / n)


def client_limits(weights: Sequence[float] | Vector, sampler: Sampler) -> Vector:
    r"""The limit on ab by each client: :math:`g^*(p_i, w_i / E[W \mid i\in S]) / w_i`.

    Where :math:`E[W \mid i \in S]` or p is known by bounds only, the value is the least one that they allow: g* grows
    with p, and first grows and then falls with c, so that its least value is at an end of the interval.

    >>> from lightning_fed.sampling import Uniform
    >>> heavy = [0.25] + 29 * [0.75 / 29]
    >>> [round(float(client_limits(heavy, Uniform(size)).min()), 3) for size in (1, 2, 3, 5, 10)]
    [0.136, 0.274, 0.412, 0.683, 1.359]
    """
    w = normalised(weights)
    p = sampler.inclusion_probabilities(w.size)
    ends = [p * (2 - w / W) / (W * (1 - p + p * w / W / 2)) for W in cohort_weight(sampler, w)]
    return np.minimum(*ends)


@dataclass(frozen=True)
class Stability:
    r"""Whether a run's ab is safe under its sampling and weights, and what would be.

    Args:
        steps: ab and a.
        limit: :math:`\min_i g^*_i / w_i`, the least of :func:`client_limits`.
        client: index of the client that decides it.
        weight: share of this client in the objective.
        probability: its probability to be drawn.
        theorem: ``A`` or ``B`` if that theorem of ``docs/primal_dual.md`` covers the run's steps, weights and sampling
            (for the losses and local work that it assumes); None if none does.
        by_weight: largest safe ab if as many clients are drawn with probabilities proportional to their weights.
        uniform: largest safe ab with equal weights.

    >>> from lightning_fed.algorithms import FedPrimalDual
    >>> from lightning_fed.sampling import Uniform
    >>> heavy = [0.25] + 29 * [0.75 / 29]
    >>> found = stability_of(FedPrimalDual(a=0.1, b=3.0).dual_steps, heavy, Uniform(3))
    >>> round(found.ab, 6), found.client, round(found.limit, 3)
    (0.3, 0, 0.412)
    """

    steps: DualSteps
    limit: float
    client: int
    weight: float
    probability: float
    theorem: Theorem | None
    by_weight: float = math.nan
    uniform: float = math.nan

    @property
    def ab(self) -> float:
        """The product of dual step and server step."""
        return self.steps.gain

    @property
    def ceiling(self) -> float:
        """The bound with everybody in every round: 2(1-a), or 2 for local problems that are solved."""
        return ceiling_of(self.steps)

    @property
    def largest_ab(self) -> float:
        """Largest ab that is safe: half of the limit, below the ceiling; or the present ab, if a theorem covers it."""
        rule = min(SAFE_SHARE * self.limit, self.ceiling)
        return rule if self.theorem is None else max(rule, self.ab)

    @property
    def largest_b(self) -> float | None:
        """Largest safe b at the present a; None if a is not known."""
        return None if self.steps.rate is None else self.largest_ab / self.steps.rate

    @property
    def safe(self) -> bool:
        """Whether a theorem covers the run, or ab is at most half of the limit and below the ceiling."""
        inside = self.ab <= SAFE_SHARE * self.limit * (1 + SLACK) and self.ab < self.ceiling
        return self.theorem is not None or inside

    def reason(self, who: object) -> str:
        """Why ab should be at most ``largest_ab``; ``who`` names the client that decides."""
        if self.ceiling <= SAFE_SHARE * self.limit:
            bound = "2" if self.ceiling == 2 else f"2 (1 - a) = {self.ceiling:.3g}"
            return f"ab must be below {bound}, even if everybody takes part in every round"
        return (
            f"client {who!r} has {self.weight:.3g} of the weight and is drawn with probability {self.probability:.3g},"
            f" so ab should be at most {self.largest_ab:.3g}, half of the limit {self.limit:.3g}"
        )

    @property
    def cures(self) -> list[str]:
        """Changes that make the run safe, each with the largest ab or b that it allows."""
        found = [f"sigma * lam of FedPrimalDual at most {self.largest_ab:.3g}"]
        if self.largest_b is not None and not self.steps.solved:
            found = [f"b at most {self.largest_b:.3g}" if self.largest_b > 0 else "a below 1"]
        if self.by_weight >= self.ab:
            found.append(f"draws by weight, sampler=Systematic(size, weights), for ab up to {self.by_weight:.3g}")
        if self.uniform >= self.ab:
            found.append(f'weights="uniform", for ab up to {self.uniform:.3g}')
        return found


def stability_of(steps: DualSteps, weights: Sequence[float] | Vector, sampler: Sampler) -> Stability:
    """Assess the steps of an algorithm, ``algorithm.dual_steps``, with one weight per client.

    >>> from lightning_fed.sampling import Uniform
    >>> heavy = [0.25] + 29 * [0.75 / 29]
    >>> found = stability_of(DualSteps(gain=0.3, rate=0.1), heavy, Uniform(1))          # a = 0.1, b = 3
    >>> found.safe, found.client, round(found.limit, 3), round(found.largest_ab, 3), round(found.largest_b, 2)
    (False, 0, 0.136, 0.068, 0.68)
    >>> round(found.by_weight, 3), round(found.uniform, 3)          # other draws or weights that allow 0.3
    (0.507, 0.508)
    >>> stability_of(DualSteps(gain=0.3, rate=0.1), heavy, Uniform(10)).safe
    True
    """
    w = normalised(weights)
    size = max(1, min(w.size, round(sampler.inclusion_probabilities(w.size).sum())))
    by_weight = _assess(steps, w, Systematic(size, w.tolist())).largest_ab
    uniform = _assess(steps, np.full(w.size, 1 / w.size), sampler).largest_ab
    return replace(_assess(steps, w, sampler), by_weight=by_weight, uniform=uniform)


def _assess(steps: DualSteps, w: Vector, sampler: Sampler) -> Stability:
    limits, p = client_limits(w, sampler), sampler.inclusion_probabilities(w.size)
    client = int(limits.argmin())
    decided = (float(limits[client]), client, float(w[client]), float(p[client]))
    return Stability(steps, *decided, theorem=theorem_for(steps, w, sampler))
