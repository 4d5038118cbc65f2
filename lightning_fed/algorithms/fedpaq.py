from __future__ import annotations

import math
from dataclasses import dataclass, replace

from lightning_fed.algorithms.fedavg import ClientState, FedAvg, Message
from lightning_fed.arguments import whole
from lightning_fed.core import Broadcast, Local, Reply, Weights
from lightning_fed.transforms import Quantize


@dataclass(frozen=True, kw_only=True)
class FedPAQ(FedAvg):
    r"""FedAvg whose clients send a quantised change of the model (Reisizadeh et al. 2020).

    .. math::
        \bar x \leftarrow \bar x + \eta_s \tfrac1{|S|}\textstyle\sum_{i\in S} Q(x_i - \bar x)

    Args:
        levels: of the stochastic quantiser :class:`~lightning_fed.transforms.Quantize`; None sends all of it.
        server_lr: server step, as in :class:`FedAvg`.
        weights: ``uniform`` or ``samples``, as in :class:`FedAvg`.

    Reference: arXiv:1909.13014.
    """

    levels: int | None = 16
    weights: Weights = "uniform"

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "levels", 1, optional=True)

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        reply = super().client_step(client, down, local)
        if self.levels is None:
            return reply
        sent = Quantize(self.levels)(reply.message.delta_i, local.rng("quantize"))
        return replace(reply, message=Message(sent.value), bytes_up=math.ceil(sent.bits / 8))
