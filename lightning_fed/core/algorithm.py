"""The interface between algorithms and everything else: `Algorithm`, its states and its hyper-parameters.

In a round the server broadcasts, clients reply with :meth:`Algorithm.client_step`, the messages are summed, and
:meth:`Algorithm.server_step` updates the server state. All steps are pure functions of flat vectors.
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Generic, Literal, Protocol, TypeVar

from torch import Tensor
from typing_extensions import Self

from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.messages import Broadcast, ClientT, MessageT, Reply, Total
from lightning_fed.core.problem import Local, Solution
from lightning_fed.core.prox import Prox
from lightning_fed.core.records import num_bytes as num_bytes
from lightning_fed.core.records import record as record
from lightning_fed.core.records import tree_map as tree_map
from lightning_fed.core.records import wide as wide
from lightning_fed.core.traits import DualSteps, Traits
from lightning_fed.core.zero import Zero

if TYPE_CHECKING:
    from lightning_fed.core.layout import Layout

ServerT = TypeVar("ServerT", bound="HasModel")


Start = Literal["local", "server", "centre"]
"""Where local work starts: the client's own last model, the server's model, or the minimiser of the added quadratic.

>>> from typing import get_args
>>> from lightning_fed.core import Start
>>> get_args(Start)
('local', 'server', 'centre')
"""

Weights = Literal["uniform", "samples"]
"""Weights of clients in the objective: equal, or proportional to their numbers of samples.

>>> from lightning_fed.algorithms import FedADMM
>>> [FedADMM(weights=weights).weight(num_examples=50) for weights in ("uniform", "samples")]
[1.0, 50.0]
"""


class HasProx(Protocol):
    """An algorithm with a ``g``."""

    @property
    def g(self) -> Prox: ...


class HasModel(Protocol):
    """A server state; ``x_bar`` is the model that is evaluated, saved and served."""

    @property
    def x_bar(self) -> Tensor: ...


class Algorithm(ABC, Generic[ServerT, ClientT, MessageT]):
    """A federated algorithm: frozen hyper-parameters and pure steps on flat vectors.

    Subclasses are frozen dataclasses. ``client_step`` may call ``local.solve`` once or more; ``server_step`` is not
    called in a round without replies.

    >>> from dataclasses import dataclass
    >>> from lightning_fed import Quadratic, simulate
    >>> @record
    ... class State:
    ...     x_bar: Tensor
    >>> @record
    ... class Memory:
    ...     pass  # clients keep nothing
    >>> @record
    ... class Message:
    ...     gradient_i: Tensor
    >>> @dataclass(frozen=True)
    ... class GradientMethod(Algorithm[State, Memory, Message]):
    ...     lr: float = 0.5
    ...
    ...     def init_server(self, x0):
    ...         return State(x0)
    ...
    ...     def init_client(self, x0):
    ...         return Memory()
    ...
    ...     def client_step(self, client, down, local):
    ...         return Reply(client, Message(local.gradient(down.x_bar)), down.x_bar)
    ...
    ...     def server_step(self, server, total):
    ...         return State(server.x_bar - self.lr * total.sum.gradient_i / total.weight)
    >>> clients = [Quadratic.scalar(1.0, 3.0), Quadratic.scalar(3.0, 1.0)]  # a/2 x^2 - b x; their mean is minimal at 1
    >>> round(float(simulate(GradientMethod(), clients, rounds=60).x_bar), 6)
    1.0
    """

    #: The part of the objective that only the server knows.
    g: Prox = Zero()
    #: Weights of the clients in the objective: equal, or proportional to their numbers of samples.
    weights: Weights = "uniform"

    @abstractmethod
    def init_server(self, x0: Tensor) -> ServerT:
        """The state of the server before round 0; ``x0`` is the first model."""

    @abstractmethod
    def init_client(self, x0: Tensor) -> ClientT:
        """The state of a client that never took part; ``x0`` is the first model, never today's ``x_bar``."""

    @abstractmethod
    def client_step(self, client: ClientT, down: Broadcast, local: Local) -> Reply[ClientT, MessageT]:
        """Do one client's work in a round and return its new state, its message and what is logged.

        ``client`` is its state, ``down`` what the server sent, and ``local`` answers questions about its loss.
        """

    @abstractmethod
    def server_step(self, server: ServerT, total: Total[MessageT]) -> ServerT:
        """The server state after a round, from its old state and the sum of the messages."""

    def broadcast(self, server: ServerT, work: LocalWork) -> Broadcast:
        """Build the message that the server sends to every client of the cohort; ``work`` is their local work."""
        return Broadcast(server.x_bar)

    def bind(self, layout: Layout) -> Self:
        """Return the same algorithm with ``g`` bound to the layout; called before every other method."""
        if dataclasses.is_dataclass(self) and any(field.name == "g" for field in dataclasses.fields(self)):
            return dataclasses.replace(self, g=self.g.bind(layout))
        return self

    def planned(self, lr_sum: float) -> Algorithm[Any, Any, Any]:
        """Return the same algorithm with settings such as ``eta="auto"`` replaced by numbers; called before round 0.

        ``lr_sum`` is the planned sum of the step sizes of a visit (:class:`LocalWork`), NaN where it is unknown.
        """
        return self

    def bytes_down(self, down: Broadcast) -> int:
        """Number of bytes that sending ``down`` to one client takes."""
        return num_bytes(down)

    def weight(self, num_examples: int) -> float:
        """Weight of a client that holds ``num_examples`` samples; only ratios between clients matter."""
        return float(num_examples) if self.weights == "samples" else 1.0

    def share(self, client: ClientT) -> Tensor | None:
        """The client's share of what the server remembers as a mean over all clients; None where it remembers none."""
        return None

    def revised(self, server: ServerT, revise: Callable[[Tensor], Tensor]) -> ServerT:
        """The server with ``revise`` applied to the mean of the clients' shares, and the model that follows from it."""
        return server

    def acknowledge(self, before: ClientT, after: ClientT, arrived: MessageT, down: Broadcast) -> ClientT:
        """Return the state of a client whose message was changed in transit, from ``after`` and what ``arrived``.

        ``before`` is its state before the visit, ``down`` what it had received.
        """
        return after

    @property
    def acknowledges(self) -> bool:
        """Whether :meth:`acknowledge` corrects a client's state for what did not arrive."""
        return type(self).acknowledge is not Algorithm.acknowledge

    def local_model(self, client: ClientT) -> Tensor | None:
        """The client's own model, if its state has one: ``x_i``."""
        return getattr(client, "x_i", None)

    @property
    def traits(self) -> Traits:
        """Facts about the algorithm that engines, checks and theory read."""
        return Traits()

    @property
    def dual_steps(self) -> DualSteps | None:
        """Steps of a method whose server adds the duals of all clients to the mean of a cohort; None for others.

        How large they may be depends on sampling and weights, which is checked before a run.
        """
        return None


def length_of(solution: Solution, who: object) -> float:
    """Return the sum of the local step sizes; raise if it is unknown, because algorithm ``who`` needs it."""
    if solution.lr_sum != solution.lr_sum:
        raise ValueError(f"{type(who).__name__} needs plain gradient steps, whose lengths are known.")
    return solution.lr_sum


def start_point(rule: Start, *, own: Tensor, server: Tensor, centre: Callable[[], Tensor]) -> Tensor:
    """Choose the start of local work: the client's last point, the server's model, or the quadratic's minimiser.

    ``centre`` is a function, since only the rule ``centre`` needs its value.

    >>> import torch
    >>> own, server = torch.tensor([1.0]), torch.tensor([2.0])
    >>> start_point("server", own=own, server=server, centre=lambda: own - 4)
    tensor([2.])
    >>> start_point("centre", own=own, server=server, centre=lambda: own - 4)
    tensor([-3.])
    """
    return centre() if rule == "centre" else {"local": own, "server": server}[rule]


def check_g(owner: HasProx) -> None:
    """Refuse a ``g`` that is not an object of :mod:`lightning_fed.prox`."""
    if not isinstance(owner.g, Prox):
        raise TypeError(f"{type(owner).__name__}.g must be a Prox such as L1(1e-4), got {owner.g!r}.")


def hyper_parameters(algorithm: object) -> dict[str, object]:
    """List the class name and all fields, those of nested dataclasses included, for logs and checkpoints.

    >>> from lightning_fed.algorithms import FedProx
    >>> hyper_parameters(FedProx(mu=0.5))
    {'name': 'FedProx', 'server_lr': 1.0, 'weights': 'samples', 'stragglers': 0.0, 'mu': 0.5}
    """
    if not dataclasses.is_dataclass(algorithm):
        return {"name": type(algorithm).__name__}
    values = {field.name: getattr(algorithm, field.name) for field in dataclasses.fields(algorithm)}
    return {"name": type(algorithm).__name__, **{k: _plain(v) for k, v in values.items()}}


def _plain(value: object) -> object:
    if dataclasses.is_dataclass(value):
        return hyper_parameters(value)
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value.tolist() if isinstance(value, Tensor) else value
