from __future__ import annotations

import math
import warnings
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.algorithms.forwarding import Forwarding
from lightning_fed.core.algorithm import Algorithm, record
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.problem import Local
from lightning_fed.prox import Prox
from lightning_fed.transforms import Transform

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout


@record
class ClientState:
    inner: Any  # state of the wrapped algorithm
    kept: Tensor  # sum of the parts of messages that were not sent; empty without feedback


@dataclass(frozen=True)
class Compressed(Forwarding):
    r"""Run any algorithm with transformed uploads: quantised, cut to the largest entries, clipped.

    The server's state stays the mean of the clients' variables: the unsent part of a change (FedADMM, FedDR) is kept
    and added to the client's next change, and clients whose variables the server averages (FedSplit, FedDyn, Scaffold)
    set them to the values that *arrived*. For other algorithms, ``feedback`` adds the unsent part to the next message.

    Args:
        algorithm: the algorithm to run.
        transform: the transform of its messages, applied vector by vector.
        feedback: keep the unsent part of each message and add it to the next one.

    >>> from lightning_fed import Quadratic, simulate
    >>> from lightning_fed.algorithms import FedADMM
    >>> from lightning_fed.transforms import TopK
    >>> clients = [Quadratic([[1.0, 0.0], [0.0, 2.0]], [1.0, 2.0]), Quadratic([[2.0, 0.0], [0.0, 1.0]], [2.0, 1.0])]
    >>> simulate(Compressed(FedADMM(eta=2.0), TopK(1)), clients, rounds=200).x_bar.round(decimals=6)
    tensor([1., 1.], dtype=torch.float64)
    """

    algorithm: Algorithm[Any, Any, Any]
    transform: Transform
    feedback: bool = False

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise TypeError(f"Compressed.algorithm must be an Algorithm such as FedADMM(), got {self.algorithm!r}.")
        if not isinstance(self.transform, Transform):
            raise TypeError(f"Compressed.transform must be a Transform such as Quantize(16), got {self.transform!r}.")
        if self.feedback and self._remembers:
            raise ValueError(
                f"Compressed(feedback=True) would count twice the unsent part of messages:"
                f" {type(self.algorithm).__name__} corrects for it already. Use feedback=False."
            )
        if self.feedback and self.algorithm.traits.exchanges > 1:
            raise ValueError(
                f"Compressed(feedback=True) would mix the unsent parts of different messages:"
                f" {type(self.algorithm).__name__} sends {self.algorithm.traits.exchanges} in a round."
                " Use feedback=False."
            )

    @property
    def inner(self) -> Algorithm[Any, Any, Any]:
        """The algorithm whose uploads are transformed."""
        return self.algorithm

    @property
    def g(self) -> Prox:  # type: ignore[override]
        return self.algorithm.g

    def init_client(self, x0: Tensor) -> ClientState:
        kept = torch.zeros_like(x0) if self._keeps else x0[:0]
        return ClientState(self.algorithm.init_client(x0), kept)

    def planned(self, lr_sum: float) -> Compressed:
        planned = self.algorithm.planned(lr_sum)
        return self if planned is self.algorithm else replace(self, algorithm=planned)

    @property
    def _keeps(self) -> bool:
        """Whether the unsent part of a message is added to the next message."""
        return self.feedback or self.algorithm.traits.sends_changes

    @property
    def _remembers(self) -> bool:
        """Whether the algorithm itself corrects for the unsent part of a message."""
        return self.algorithm.acknowledges or self.algorithm.traits.sends_changes

    def bind(self, layout: Layout) -> Compressed:
        bound = replace(self, algorithm=self.algorithm.bind(layout), transform=self.transform.bind(layout))
        if (self._remembers or self.feedback) and (noise := bound.transform.noise(layout.numel)) >= 1:
            warnings.warn(
                f"{self.transform} adds noise of up to {noise:.2g} times the squared norm of a message. The error of a"
                " message is added to the next one, with new noise: from 1 on it may grow from visit to visit. Use more"
                f" levels than the square root of the number of parameters, {layout.numel}.",
                stacklevel=2,
            )
        return bound

    def client_step(self, client: ClientState, down: Broadcast, local: Local) -> Reply[ClientState, Any]:
        """Run the client step of the wrapped algorithm, then transform each vector of its message."""
        reply = self.algorithm.client_step(client.inner, down, local)
        rng, bits, kept = local.rng("transform"), 0, client.kept
        leaves, tree = pytree.tree_flatten(reply.message)
        arrived = []
        for leaf in leaves:
            if leaf.ndim > 1:
                raise ValueError(
                    f"Compressed takes the message of one client at a time, got shape {tuple(leaf.shape)}."
                    " Stack clients by torch.vmap."
                )
            if not leaf.ndim or not leaf.numel():
                arrived.append(leaf)
                bits += leaf.numel() * leaf.element_size() * 8
                continue
            wanted = leaf + kept if self._keeps else leaf
            sent = self.transform(wanted, rng)
            kept = wanted - sent.value if self._keeps else kept
            arrived.append(sent.value)
            bits += sent.bits
        message = pytree.tree_unflatten(arrived, tree)
        state = ClientState(self.algorithm.acknowledge(client.inner, reply.state, message, down), kept)
        return replace(reply, state=state, message=message, bytes_up=math.ceil(bits / 8))

    def local_model(self, client: ClientState) -> Tensor | None:
        return self.algorithm.local_model(client.inner)

    def share(self, client: ClientState) -> Tensor | None:
        own, kept = self.algorithm.share(client.inner), client.kept
        if own is None or not self.algorithm.traits.sends_changes:
            return own
        return torch.cat([own[: kept.numel()] - kept, own[kept.numel() :]])  # a share may end in a counter
