"""The messages between server and clients in a round, and their weighted sum."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from lightning_fed.core.records import record, tree_map

ClientT = TypeVar("ClientT")
MessageT = TypeVar("MessageT")


@record
class Broadcast:
    """The server's message to clients; for most algorithms the model alone.

    An algorithm that sends more adds fields in a record of its own:

    >>> from lightning_fed.core import num_bytes
    >>> @record
    ... class Down(Broadcast):
    ...     c: Tensor
    >>> num_bytes(Down(torch.zeros(10), torch.zeros(10)))  # what a client downloads
    80
    """

    x_bar: Tensor


@dataclass(frozen=True, eq=False)
class Reply(Generic[ClientT, MessageT]):
    """A client's reply: its new state, its message to the server, and its local model ``x_i``.

    ``bytes_up`` is the size of the encoded message; None means the size of its tensors. A reply that has not
    ``arrived`` is dropped: the server does not sum its message, and the client keeps its old state. ``gradients``
    counts the gradients that the client took over all of its data.

    >>> from lightning_fed.algorithms import FedADMM
    >>> from lightning_fed.laboratory.quadratic import Exact, Oracle, Quadratic
    >>> x0, local = torch.zeros(1, dtype=torch.float64), Oracle(Quadratic.scalar(1.0, 3.0), Exact())
    >>> algorithm = FedADMM(eta=2.0)
    >>> reply = algorithm.client_step(algorithm.init_client(x0), Broadcast(x0), local)
    >>> round(float(reply.x_i), 6), round(float(reply.state.z_i), 6)  # 3 / (1 + eta), and eta times its move
    (1.0, 2.0)
    """

    state: ClientT
    message: MessageT
    x_i: Tensor
    loss: float = float("nan")
    steps: int = 0
    bytes_up: int | None = None
    arrived: bool = True
    gradients: int = 0


@dataclass(frozen=True, eq=False)
class Total(Generic[MessageT]):
    """Sum of ``weight_i * message_i`` over the clients whose replies arrived.

    ``weight`` is the sum of their weights, ``count`` their number, ``population`` the weight of *all* clients, and
    ``down`` what the server had sent them.

    >>> @record
    ... class Message:
    ...     delta_i: Tensor
    >>> total = Total(Message(torch.tensor([6.0])), weight=2.0, count=2, population=4.0, down=Broadcast(torch.zeros(1)))
    >>> float(total.sum.delta_i / total.weight), float(total.sum.delta_i / total.population)  # mean of cohort; of all
    (3.0, 1.5)
    """

    sum: MessageT
    weight: float
    count: int
    population: float
    down: Broadcast


@dataclass(frozen=True, eq=False)
class Replies:
    """The replies of several clients, with their messages and models stacked (m, d)."""

    states: Sequence[Any]
    message: Any
    x_i: Tensor
    losses: Sequence[float]
    steps: Sequence[int]
    bytes_up: Sequence[int | None]
    arrived: Sequence[bool]
    gradients: Sequence[int]

    @classmethod
    def of(cls, *replies: Reply[Any, Any]) -> Replies:
        return cls(
            [reply.state for reply in replies],
            tree_map(_stacked, *(reply.message for reply in replies)),
            _stacked(*(reply.x_i for reply in replies)),
            [reply.loss for reply in replies],
            [reply.steps for reply in replies],
            [reply.bytes_up for reply in replies],
            [reply.arrived for reply in replies],
            [reply.gradients for reply in replies],
        )

    def apart(self) -> Iterator[Reply[Any, Any]]:
        """Yield the replies one by one."""
        for i, state in enumerate(self.states):
            message = tree_map(lambda leaf, i=i: leaf[i], self.message)
            counts = self.losses[i], self.steps[i], self.bytes_up[i], self.arrived[i], self.gradients[i]
            yield Reply(state, message, self.x_i[i], *counts)


@dataclass(frozen=True, eq=False)
class Summed:
    """The replies of a whole cohort, some of them from other processes, without messages: ``sum`` is known already.

    ``replies`` are in the order of the cohort; None for messages and models that stayed where they were made.
    """

    sum: Any
    replies: Sequence[Reply[Any, Any]]


def _stacked(*rows: Tensor) -> Tensor:
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
