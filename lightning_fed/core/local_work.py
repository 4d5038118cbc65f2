"""The local work of a visit and its tolerance."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass


class Tolerance(ABC):
    r"""Local work may stop at x when :math:`r = \|\nabla\varphi(x)\|` is small enough.

    Here :math:`\varphi(x) = f_i(x) + \langle l, x\rangle + \frac\rho2\|x-c\|^2` is the objective of the local problem
    and the gradient of :math:`f_i` is taken over all of the client's data.

    A new rule defines :meth:`limit`:

    >>> class Halving(Tolerance):  # half of what the last round allowed
    ...     def limit(self, round, rho, first):
    ...         return 0.5**round
    >>> [Halving().limit(k, rho=1.0, first=1.0) for k in range(3)]
    [1.0, 0.5, 0.25]
    """

    @abstractmethod
    def limit(self, round: int, rho: float, first: float) -> float:
        """Upper bound on r in this round, for a problem with penalty ``rho`` whose r was ``first`` at the start."""


@dataclass(frozen=True)
class LocalWork:
    """The work of a visit, and the seed of its random numbers.

    Args:
        seed: seed of batches and of everything random in training.
        steps: batches of a visit, or None where ``epochs`` says how many there are.
        epochs: passes over the client's data.
        tolerance: how well the local problem has to be solved; ``steps`` or ``epochs`` are then the most a visit does.
        lr_sum: planned sum of the step sizes of a visit in this round, as the weighted mean over all clients, so that
            it does not depend on the cohort. NaN if local steps are not plain gradient steps, or if the algorithm's
            traits do not ask for it.
        seconds: the most that a visit may take, checked between batches; None for no limit.
    """

    seed: int
    steps: int | None = None
    epochs: int | None = None
    tolerance: Tolerance | None = None
    lr_sum: float = float("nan")
    seconds: float | None = None
