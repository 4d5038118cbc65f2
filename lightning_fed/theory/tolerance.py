"""Tolerances: how exactly a local problem must be solved before a visit may end."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_fed.core.local_work import Tolerance as Tolerance
from lightning_fed.core.validation import is_number, positive, shown
from lightning_fed.theory.bounds import residual_for, summable_error2

NEARNESS = "It is the Lipschitz constant of the clients' gradients; leave it out to bound the gradient itself."


@dataclass(frozen=True)
class Absolute(Tolerance):
    r""":math:`r \le \varepsilon`; with ``L``, :math:`r \le (\rho-L)\varepsilon`, so that
    :math:`\|x - x^*\| \le \varepsilon`.

    FedPD's rule :math:`\|\nabla\varphi\|^2 \le \varepsilon_1` is ``Absolute(eps1**0.5)``.

    >>> Absolute(0.1).limit(0, rho=4.0, first=1.0), round(Absolute(0.1, L=1.0).limit(0, rho=4.0, first=1.0), 12)
    (0.1, 0.3)
    """

    epsilon: float
    L: float | None = None

    def __post_init__(self) -> None:
        positive(self, "epsilon", "It is what the gradient of the local problem may still be.")
        _check_lipschitz(self)

    def limit(self, round: int, rho: float, first: float) -> float:
        return self.epsilon if self.L is None else residual_for(self.epsilon, rho, self.L)


@dataclass(frozen=True)
class Relative(Tolerance):
    r""":math:`r \le \gamma\,r(v)`: a share of the residual at the start of local work (FedProx).

    >>> Relative(0.1).limit(3, rho=1.0, first=5.0)
    0.5
    """

    gamma: float

    def __post_init__(self) -> None:
        if not is_number(self.gamma) or not 0 < self.gamma < 1:
            raise ValueError(
                f"Relative.gamma must lie in (0, 1), got {shown(self.gamma)}. 0.1 is a tenth of the start's residual."
            )

    def limit(self, round: int, rho: float, first: float) -> float:
        return self.gamma * first


@dataclass(frozen=True)
class Summable(Tolerance):
    r""":class:`Absolute` with :math:`\varepsilon_k^2 = D/((k+1)(k+2))` in round k: all rounds together allow ``D``.

    The theorem assumes this of inexact solutions. An exchange before round 0 has the tolerance of round 0.

    >>> [round(Summable(D=6.0).limit(k, rho=4.0, first=1.0) ** 2, 12) for k in range(3)]
    [3.0, 1.0, 0.5]
    """

    D: float
    L: float | None = None

    def __post_init__(self) -> None:
        positive(self, "D", "It is the sum of squared errors over all rounds.")
        _check_lipschitz(self)

    def limit(self, round: int, rho: float, first: float) -> float:
        return Absolute(summable_error2(max(round, 0), self.D) ** 0.5, self.L).limit(round, rho, first)


def as_tolerance(value: float | Tolerance) -> Tolerance:
    """The tolerance ``value``; a number becomes :class:`Absolute`."""
    if isinstance(value, Tolerance):
        return value
    if not is_number(value):
        raise TypeError(f"A tolerance is a number, Absolute, Relative or Summable; got {shown(value)}.")
    return Absolute(value)


def _check_lipschitz(owner: Absolute | Summable) -> None:
    if owner.L is not None:
        positive(owner, "L", NEARNESS)
