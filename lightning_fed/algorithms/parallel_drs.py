from __future__ import annotations

from dataclasses import dataclass

from lightning_fed.algorithms.feddr import FedDR


@dataclass(frozen=True)
class ParallelDRS(FedDR):
    r"""Douglas-Rachford splitting on the consensus problem: :class:`FedDR` with all clients, every round.

    .. math::
        y_i \leftarrow y_i + \alpha(\bar x - x_i), \quad x_i \approx \mathrm{prox}_{\hat\eta f_i}(y_i), \quad
        \bar x \leftarrow \mathrm{prox}_{\hat\eta g}\big(\textstyle\sum_i w_i (2x_i - y_i)\big)
    """

    @property
    def everybody(self) -> bool:
        return True
