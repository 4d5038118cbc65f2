from __future__ import annotations

from abc import ABC, abstractmethod

from torch import Tensor

from lightning_fed.arguments import is_number


class Prox(ABC):
    r"""A convex :math:`g` with :math:`\mathrm{prox}_{tg}(v) = \arg\min_x g(x) + \frac1{2t}\|x - v\|^2`.

    Arguments are flat vectors (any leading dimensions are separate vectors); neither is modified.
    """

    #: True for the indicator of a set: its prox is a projection and does not depend on ``t``.
    indicator: bool = False

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """:math:`g(x)`; ``inf`` outside the set of an indicator."""

    @abstractmethod
    def prox(self, v: Tensor, t: float) -> Tensor:
        """The minimiser of :math:`g(x) + |x - v|^2 / (2t)`."""


def check_strength(g: object, c: float) -> None:
    """Refuse a strength that would make ``g`` concave or undefined."""
    if not is_number(c) or not 0 <= c < float("inf"):
        raise ValueError(f"{type(g).__name__}.c must be a finite number >= 0, got {c!r}. It is the strength of g.")
