from __future__ import annotations

import copy
import math
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, ClassVar, Literal

from typing_extensions import Self

from lightning_fed.algorithms.fedavg import ClientState, FedAvg, Message
from lightning_fed.core.algorithm import Weights
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.problem import Local
from lightning_fed.core.validation import one_of, whole
from lightning_fed.transforms import Quantize

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


@dataclass(frozen=True, kw_only=True)
class FedPAQ(FedAvg):
    r"""FedAvg whose clients send a quantised change of the model (Reisizadeh et al. 2020).

    .. math::
        \bar x \leftarrow \bar x + \eta_s \tfrac1{|S|}\textstyle\sum_{i\in S} Q(x_i - \bar x)

    Args:
        levels: levels of the stochastic quantiser :class:`~lightning_fed.transforms.Quantize`; None does not quantise.
        per: one norm for the whole ``vector`` or for every parameter ``tensor``, as in the quantiser.
        server_lr: server step, as in :class:`FedAvg`.
        weights: ``uniform`` or ``samples``, as in :class:`FedAvg`.
        stragglers: fraction of clients whose replies are dropped, as in :class:`FedAvg`.

    Reference: arXiv:1909.13014.

    >>> from lightning_fed import Quadratic, simulate
    >>> clients = [Quadratic([[1.0, 0.0], [0.0, 2.0]], [3.0, 4.0])]  # minimal at (3, 2)
    >>> one = simulate(FedPAQ(levels=1), clients, rounds=1, seed=1).x_bar  # entries are 0 or plus or minus the norm
    >>> all(round(float(entry) ** 2, 6) in (0.0, 13.0) for entry in one)
    True
    >>> simulate(FedPAQ(levels=None), clients, rounds=1).x_bar.round(decimals=6).tolist()  # not quantised
    [3.0, 2.0]
    """

    levels: int | None = 16
    per: Literal["vector", "tensor"] = "vector"
    weights: Weights = "uniform"

    #: set by bind, which has the layout of the tensors
    _quantize: ClassVar[Quantize | None] = None

    def __post_init__(self) -> None:
        super().__post_init__()
        whole(self, "levels", 1, optional=True)
        one_of(self, "per", ("vector", "tensor"))

    def bind(self, layout: Layout) -> Self:
        bound = copy.copy(self)
        if self.levels is not None:
            object.__setattr__(bound, "_quantize", Quantize(self.levels, self.per).bind(layout))
        return bound

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Message]:
        reply = super().client_step(client, down, local)
        if self.levels is None or not reply.arrived:
            return reply
        quantize = self._quantize or Quantize(self.levels, self.per)
        sent = quantize(reply.message.delta_i, local.rng("quantize"))
        return replace(reply, message=Message(sent.value), bytes_up=math.ceil(sent.bits / 8))
