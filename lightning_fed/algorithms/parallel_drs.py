from __future__ import annotations

from dataclasses import dataclass, replace

from lightning_fed.algorithms.feddr import FedDR
from lightning_fed.core.traits import Traits


@dataclass(frozen=True)
class ParallelDRS(FedDR):
    r"""Douglas-Rachford splitting on the consensus problem: :class:`FedDR` with all clients, every round.

    .. math::
        y_i \leftarrow y_i + \alpha(\bar x - x_i), \quad x_i \approx \mathrm{prox}_{\hat\eta f_i}(y_i), \quad
        \bar x \leftarrow \mathrm{prox}_{\hat\eta g}\big(\textstyle\sum_i w_i (2x_i - y_i)\big)

    The arguments are those of :class:`FedDR`; cohorts that leave a client out are refused.

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # their mean is minimal at 1
    >>> round(float(simulate(ParallelDRS(eta_hat=0.5), clients, rounds=60).x_bar), 6)
    1.0
    >>> simulate(ParallelDRS(), clients, cohorts=[[0]])
    Traceback (most recent call last):
    ValueError: ...
    """

    @property
    def traits(self) -> Traits:
        return replace(super().traits, everybody=True)
