"""Samplings that prefer clients of larger weight."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.validation import whole
from lightning_fed.sampling.base import Sampler, numbers


@dataclass(frozen=True)
class Systematic(Sampler):
    r"""Exactly ``size`` clients, unequally likely: :math:`\pi_i = \min(1, \kappa w_i)` with :math:`\sum_i \pi_i = S`.

    Clients are put in random order on a line, as intervals of lengths :math:`\pi_i`; those that contain one of
    :math:`u, u + 1, \dots, u + S - 1`, with u uniform in [0, 1), are drawn. Among online clients:
    ``size`` by the same weights, or all if there are fewer.

    >>> Systematic(3, [1, 1, 2, 3, 5, 8]).inclusion_probabilities(6) * 6
    array([1., 1., 2., 3., 5., 6.])

    Reference: systematic sampling with probability proportional to size (Madow, 1949), in random order.
    """

    size: int
    weights: Sequence[float]

    def __post_init__(self) -> None:
        whole(self, "size", 1)
        _freeze_weights(self, "weights")
        if self.size > len(self.weights):
            raise ValueError(
                f"Systematic.size must be at most the number of weights, {len(self.weights)}, got {self.size}."
            )
        self.check(len(self.weights))

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        _weights(self, "weights", n)
        return np.array(self._pi)

    @cached_property
    def _pi(self) -> NDArray[np.float64]:
        """Clip at 1 and scale the rest, until no value exceeds 1."""
        w = _weights(self, "weights", len(self.weights))
        sure = np.zeros(w.size, dtype=bool)
        while True:
            size = self.size - sure.sum()
            if size >= (~sure).sum():
                return np.ones(w.size)
            pi = np.where(sure, 1.0, size * w / w[~sure].sum())
            above = pi > 1 + 1e-14  # by more than rounding
            if not above.any():
                return np.minimum(pi, 1.0)
            sure |= above

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        pi = self.inclusion_probabilities(n)
        sure, order = np.flatnonzero(pi == 1), rng.permutation(np.flatnonzero(pi < 1))
        k = np.arange(self.size - sure.size)
        points = np.minimum(rng.random() + k, np.nextafter(k + 1.0, 0.0))  # the sum may round up to k + 1
        ends = np.cumsum(pi[order])
        ends[-1:] = k.size  # which rounding may have missed
        drawn: list[int] = np.union1d(sure, order[np.searchsorted(ends, points, side="right")]).tolist()
        return drawn

    def among(self, online: Sequence[int], n: int) -> Systematic:
        return Systematic(min(self.size, len(online)), _weights(self, "weights", n)[list(online)].tolist())


@dataclass(frozen=True)
class WithReplacement(Sampler):
    r"""``draws`` independent draws by weight, duplicates merged: client i has :math:`1 - (1 - w_i/\sum_j w_j)^S`.

    A cohort has at least one and at most ``draws`` clients. Among online clients: as many draws by the same weights.

    >>> WithReplacement(2, [1, 1, 2]).inclusion_probabilities(3)
    array([0.4375, 0.4375, 0.75  ])
    """

    draws: int
    weights: Sequence[float]

    def __post_init__(self) -> None:
        whole(self, "draws", 1)
        _freeze_weights(self, "weights")
        self.check(len(self.weights))

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        w = _weights(self, "weights", n)
        with np.errstate(divide="ignore"):  # a single client has log(0)
            return np.asarray(-np.expm1(self.draws * np.log1p(-w)))

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        drawn: list[int] = np.unique(rng.choice(n, size=self.draws, p=_weights(self, "weights", n))).tolist()
        return drawn

    def among(self, online: Sequence[int], n: int) -> WithReplacement:
        return WithReplacement(self.draws, _weights(self, "weights", n)[list(online)].tolist())


def _freeze_weights(owner: object, name: str) -> None:
    """Refuse an attribute other than a list of positive finite numbers; it becomes a tuple."""
    where, w = f"{type(owner).__name__}.{name}", numbers(owner, name)
    if w.ndim != 1 or not w.size:
        raise ValueError(f"{where} must be a list with one weight per client, got {getattr(owner, name)!r}.")
    bad = np.flatnonzero(~((w > 0) & np.isfinite(w)))
    if bad.size:
        raise ValueError(
            f"{where} must be positive and finite, got {w[bad[0]]} for client {bad[0]}. "
            "A client of weight 0 is never drawn; give a small weight instead."
        )
    object.__setattr__(owner, name, tuple(w.tolist()))


def _weights(owner: object, name: str, n: int) -> NDArray[np.float64]:
    """One weight per client, adding up to 1; refuse a list of another length."""
    w = numbers(owner, name)
    if w.size != n:
        raise ValueError(f"{type(owner).__name__}.{name} has {w.size} weights for {n} clients. Give one per client.")
    w = w / w.max()  # first, as the sum of large ones may overflow
    return np.asarray(w / w.sum())
