"""Measure how exactly a local problem is solved, at the point that a module holds."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_fed.core.local_work import Tolerance
from lightning_fed.core.problem import Question
from lightning_fed.trainer.hooks import Exactness


class Certificate(Exactness):
    r"""Compares :math:`r = \|\nabla\varphi(x)\|`, over all of a client's data, with the limit of a tolerance.

    Args:
        question: the terms that the local problem adds to the loss.
        tolerance: the rule that sets the limit.
        round: the number of the round.
        point: returns the module's x.
        slope: returns the gradient of the client's loss at x.
    """

    def __init__(
        self,
        question: Question,
        tolerance: Tolerance,
        round: int,
        point: Callable[[], Tensor],
        slope: Callable[[], Tensor],
    ) -> None:
        self._question, self._point, self._slope = question, point, slope
        residual = self._measure()
        super().__init__(residual, tolerance.limit(round, question.rho, residual))

    def renew(self) -> bool:
        """Measure the residual at the point that the module holds now; return whether it is within the limit."""
        self.residual = self._measure()
        return self.holds

    def _measure(self) -> float:
        return float(self._question.gradient(self._point(), self._slope()).norm())
