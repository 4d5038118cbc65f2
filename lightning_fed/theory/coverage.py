"""Which theorem of ``docs/primal_dual.md`` covers the steps, weights and sampling of a run."""

from __future__ import annotations

from typing import Literal

import numpy as np

from lightning_fed.core.traits import DualSteps
from lightning_fed.sampling import (
    Available,
    Bernoulli,
    Blocks,
    DoublyUniform,
    Full,
    NonemptyBernoulli,
    Sampler,
    Uniform,
)
from lightning_fed.theory.cohort_weight import Vector, largest_cohort

Theorem = Literal["A", "B"]

#: Numbers within this relative distance count as equal, so that rounding decides nothing.
SLACK = 1e-9


def ceiling_of(steps: DualSteps) -> float:
    """The bound on ab with everybody in every round: 2(1-a), or 2 for local problems that are solved."""
    return 2.0 if steps.solved or steps.rate is None else 2 * (1 - steps.rate)


def theorem_for(steps: DualSteps, w: Vector, sampler: Sampler) -> Theorem | None:
    """The theorem whose conditions on steps, weights and sampling hold; None if there is none.

    >>> line = DualSteps(gain=1.0, rate=1.0, solved=True)                       # FedDyn
    >>> theorem_for(line, np.full(30, 1 / 30), Uniform(1)), theorem_for(line, np.array([0.75, 0.25]), Full())
    ('B', 'A')
    """
    a, p = steps.rate, sampler.inclusion_probabilities(w.size)
    if a is None:
        return None
    if (p == 1).all() and steps.gain < ceiling_of(steps) and a < 2:
        return "A"
    if not steps.solved or a > 1:
        return None
    b, equal = steps.gain / a, bool(np.allclose(w, 1 / w.size, rtol=SLACK, atol=0))
    size = _fixed_size(sampler, w.size)
    if equal and size is not None and b <= 2 / (2 - a * size / w.size) * (1 + SLACK):
        return "B"
    one_by_weight = largest_cohort(sampler, w.size) == 1 and np.allclose(p, w, rtol=SLACK, atol=0)
    share_is_weight = one_by_weight or (equal and _exchangeable(sampler))
    return "B" if share_is_weight and abs(b - 1) <= SLACK else None


def _fixed_size(sampler: Sampler, n: int) -> int | None:
    """Size of all cohorts of a sampling with equal probabilities; None if it varies."""
    sizes = {sampler.size} if type(sampler) is Uniform else set()
    if type(sampler) is Blocks:
        sizes = {len(block) for block in sampler.partition(n)}
    return sizes.pop() if len(sizes) == 1 else None


def _exchangeable(sampler: Sampler) -> bool:
    """Whether all cohorts of one size are equally likely."""
    if type(sampler) is Available:
        return isinstance(sampler.chance, (int, float)) and _exchangeable(sampler.base)
    return type(sampler) in (Full, Uniform, DoublyUniform, Bernoulli, NonemptyBernoulli) and sampler.symmetric
