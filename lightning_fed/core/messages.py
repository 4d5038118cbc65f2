"""What travels between server and clients in a round."""

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
    """What most algorithms send down: the model."""

    x_bar: Tensor


@dataclass(frozen=True, eq=False)
class Reply(Generic[ClientT, MessageT]):
    """A client's answer: what it will remember, what it sends, and its local model ``x_i``.

    ``bytes_up`` is what sending it takes, where that is less than the message as it is. A reply that has not
    ``arrived`` counts nowhere: the server does without it, and the client forgets it. ``gradients`` is how often it
    took a gradient over all of its data.
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
    """Sum of ``weight_i * message_i`` over those who answered.

    ``weight`` is the sum of their weights, ``count`` their number, ``population`` the weight of *all* clients.
    """

    sum: MessageT
    weight: float
    count: int
    population: float


@dataclass(frozen=True, eq=False)
class Replies:
    """The answers of several clients, with their messages and models (m, d) stacked."""

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
        """One by one."""
        for i, state in enumerate(self.states):
            message = tree_map(lambda leaf, i=i: leaf[i], self.message)
            counts = self.losses[i], self.steps[i], self.bytes_up[i], self.arrived[i], self.gradients[i]
            yield Reply(state, message, self.x_i[i], *counts)


def _stacked(*rows: Tensor) -> Tensor:
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)
