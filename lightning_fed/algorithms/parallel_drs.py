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
    """

    @property
    def traits(self) -> Traits:
        return replace(super().traits, everybody=True)
