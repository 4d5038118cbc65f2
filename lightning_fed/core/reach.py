"""How far a visit's SGD steps go: what FedNova divides by."""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache


@dataclass
class Reach:
    r"""The distance that SGD steps cover if every gradient is 1: :math:`\gamma\|a_i\|_1` in FedNova's letters.

    Steps of size :math:`\gamma`, with momentum or with a penalty rho on the distance to the start, end at
    :math:`x - \sum_k \gamma a_k g_k`, where the weights a_k of the gradients g_k do not depend on them. So the same
    steps on gradients that are 1 give the sum of the weights, whatever step sizes and momenta a scheduler sets.

    The sum is the 1-norm if no weight is negative. ``length`` is NaN if one may be: with a penalty, if a step size
    exceeds 1 / rho, or if there is momentum too.

    >>> [Reach.of(3, 0.5), Reach.of(3, 1.0, momentum=0.5), Reach.of(3, 0.5, rho=1.0)]  # 1+1+1, 1+1.5+1.75, 1+1/2+1/4
    [1.5, 4.25, 0.875]
    """

    rho: float = 0.0
    length: float = 0.0
    velocity: float = 0.0

    def step(self, lr: float, momentum: float = 0.0) -> None:
        """Take one more step."""
        signed = self.rho and (momentum or lr * self.rho > 1)
        self.velocity = momentum * self.velocity + 1 - self.rho * self.length
        self.length += float("nan") if signed else lr * self.velocity

    @staticmethod
    @lru_cache(maxsize=1024)
    def of(steps: int, lr: float, momentum: float = 0.0, rho: float = 0.0) -> float:
        """The length of ``steps`` equal steps."""
        reach = Reach(rho)
        for _ in range(steps):
            reach.step(lr, momentum)
        return reach.length
