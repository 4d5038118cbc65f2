"""How exact an answer is, at the point that a module holds."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from lightning_fed.core.local_work import Tolerance
from lightning_fed.core.problem import Question
from lightning_fed.trainer.hooks import Exactness


class Certificate(Exactness):
    r"""Compares :math:`r = \|\nabla\varphi(x)\|`, over all of a client's data, with what a tolerance allows.

    Args:
        question: what the client was asked.
        tolerance: the rule.
        round: the number of the round.
        point: gives the module's x.
        slope: gives the gradient of the client's loss there.
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
        """Look at the point that the module holds now; whether it is good enough."""
        self.residual = self._measure()
        return self.holds

    def _measure(self) -> float:
        return float(self._question.gradient(self._point(), self._slope()).norm())
