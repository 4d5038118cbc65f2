"""The interface of samplings, and checks of arguments that several of them share."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import shown


class Sampler(ABC):
    """Law of the cohort. Rounds are independent draws of the same law.

    A new sampling defines its probabilities and its draw; ``seed`` and ``round`` give the random numbers:

    >>> class First(Sampler):  # client 0, and one of the others
    ...     def inclusion_probabilities(self, n):
    ...         return np.array([1.0] + [1 / (n - 1)] * (n - 1))
    ...
    ...     def draw(self, n, rng):
    ...         return [0, int(rng.integers(1, n))]
    >>> First().check(5)  # every client has a chance
    >>> cohorts = [First().cohort(5, seed=0, round=k) for k in range(50)]
    >>> sorted({client for cohort in cohorts for client in cohort})
    [0, 1, 2, 3, 4]
    """

    @abstractmethod
    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        """Probability of each of ``n`` clients to be in a round's cohort; see :meth:`exact`."""

    @abstractmethod
    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        """Indices of one cohort, ascending."""

    def cohort(self, n: int, seed: int, round: int) -> list[int]:
        """The cohort of ``round``: always the same for the same ``(n, seed, round)``.

        >>> from lightning_fed.sampling import Uniform
        >>> Uniform(2).cohort(5, seed=0, round=3) == Uniform(2).cohort(5, seed=0, round=3)
        True
        """
        return self.draw(n, numpy_generator(seed, round, "cohort"))

    def check(self, n: int) -> None:
        """Refuse a sampling that cannot draw from ``n`` clients, or never draws one of them."""
        never = np.flatnonzero(self.inclusion_probabilities(n) <= 0)
        if never.size:
            raise ValueError(
                f"{self} never draws client {never[0]} of {n}: not a proper sampling. Give every client a chance."
            )

    def may_be_empty(self, n: int) -> bool:
        """Whether a cohort of ``n`` clients can be empty; False unless a subclass overrides it."""
        return False

    def exact(self, n: int) -> bool:
        """Whether :meth:`inclusion_probabilities` are exact; otherwise they are lower bounds."""
        return True

    @property
    def symmetric(self) -> bool:
        """Whether a client's probability depends only on the number of online clients, not on which they are."""
        return False

    def among(self, online: Sequence[int], n: int) -> Sampler:
        """The law of a round that reaches only ``online`` (ascending, not empty) of ``n``; its client j is the j-th.

        With fewer others online, a client's probability must not fall; :class:`Available` relies on it.
        """
        raise TypeError(
            f"{type(self).__name__} does not define how to draw if some clients are away. Define its method among."
        )


def numbers(owner: object, name: str) -> NDArray[np.float64]:
    """An attribute as an array; refuse what is not made of numbers, texts of numbers among them."""
    value = getattr(owner, name)
    found = np.asarray(value)
    if found.dtype.kind not in "biuf":
        raise ValueError(f"{type(owner).__name__}.{name} must be made of numbers, got {shown(value)}.")
    return found.astype(float)


def freeze_probabilities(owner: object, name: str) -> None:
    """Refuse an attribute other than one probability in (0, 1] or a list of them, which becomes a tuple."""
    where = f"{type(owner).__name__}.{name}"
    p = numbers(owner, name)
    if p.ndim > 1:
        raise ValueError(f"{where} must be one probability or a list of them, got shape {p.shape}.")
    bad = np.flatnonzero(~((p > 0) & (p <= 1)))
    if bad.size:
        whose = f" for client {bad[0]}" if p.ndim else ""
        raise ValueError(f"{where} must lie in (0, 1], got {np.atleast_1d(p)[bad[0]]}{whose}.")
    if p.ndim:
        object.__setattr__(owner, name, tuple(p.tolist()))


def probabilities(owner: object, name: str, n: int) -> NDArray[np.float64]:
    """One probability per client; refuse a list of another length."""
    p = numbers(owner, name)
    if p.ndim and p.size != n:
        where = f"{type(owner).__name__}.{name}"
        raise ValueError(f"{where} has {p.size} probabilities for {n} clients. Give one, or one per client.")
    return np.full(n, p) if p.ndim == 0 else p


def freeze_client_sets(owner: object, name: str) -> None:
    """Refuse an attribute other than a list of lists of client indices; it becomes a tuple of ascending tuples."""
    where, value = f"{type(owner).__name__}.{name}", getattr(owner, name)
    if not isinstance(value, Iterable) or not all(isinstance(part, Iterable) for part in value):
        raise ValueError(f"{where} must be a list of lists of client indices such as [[0, 1], [2]], got {value!r}.")
    sets = [list(part) for part in value]
    for i in (i for part in sets for i in part):
        if isinstance(i, bool) or not isinstance(i, (int, np.integer)) or i < 0:
            raise ValueError(f"{where} must hold client indices, whole numbers from 0, got {i!r}.")
    object.__setattr__(owner, name, tuple(tuple(sorted(int(i) for i in part)) for part in sets))


def refuse_strangers(owner: object, name: str, clients: Sequence[int], n: int) -> None:
    """Refuse ascending ``clients`` that the federation does not have."""
    if clients and clients[-1] >= n:
        where = f"{type(owner).__name__}.{name}"
        raise ValueError(f"{where} names client {clients[-1]}; the federation has {n}, numbered 0 to {n - 1}.")
