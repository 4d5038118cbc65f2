"""One communication round, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol, runtime_checkable

from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, num_bytes
from lightning_fed.core.failures import Failure
from lightning_fed.core.memory import ClientId, Cost
from lightning_fed.core.messages import Broadcast, Replies, Reply, Summed, Total
from lightning_fed.core.problem import Local
from lightning_fed.core.summation import TreeSum

Step = Callable[..., Reply[Any, Any]]


class Engine(Protocol):
    """Asks clients; replies, of one or of several of them, come back in the order of the cohort.

    A client that failed, and is left out, has a :class:`Failure` in its place.
    """

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any] | Failure] | Iterator[Replies | Failure] | Iterator[Any]: ...


@runtime_checkable
class Sharing(Engine, Protocol):
    """An engine that asks a share of the cohort in this process, and gets the rest from others.

    ``stage`` is called with the reply of each client of the share, as soon as it is there.
    """

    stage: Callable[[ClientId, Reply[Any, Any]], None]

    def share(self, cohort: Sequence[ClientId]) -> Sequence[ClientId]: ...


class States(Iterator[Any]):
    """The states of a cohort, in its order, each recalled when it is asked for; or that of one client, by its id."""

    def __init__(self, cohort: Sequence[ClientId], recall: Callable[[ClientId], Any]) -> None:
        self._ids, self.of = iter(cohort), recall

    def __next__(self) -> Any:
        return self.of(next(self._ids))


@dataclass(frozen=True, eq=False)
class Outcome:
    """The changes of a round, not yet applied: the caller commits server and clients together."""

    server: Any
    states: dict[ClientId, Any] = field(default_factory=dict)
    local_models: dict[ClientId, Tensor] = field(default_factory=dict)
    losses: dict[ClientId, float] = field(default_factory=dict)
    costs: dict[ClientId, Cost] = field(default_factory=dict)
    failures: dict[ClientId, Failure] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """Total cost of all clients."""
        return Cost.sum(self.costs.values())

    @property
    def steps(self) -> dict[ClientId, int]:
        return {cid: cost.steps for cid, cost in self.costs.items()}

    @property
    def bytes_down(self) -> int:
        return self.cost.bytes_down

    @property
    def bytes_up(self) -> int:
        return self.cost.bytes_up


def run_round(
    algorithm: Algorithm[Any, Any, Any],
    server: Any,
    cohort: Sequence[ClientId],
    engine: Engine,
    recall: Callable[[ClientId], Any],
    weights: Mapping[ClientId, float],
    broadcast: Callable[[Any], Broadcast],
    exchanges: int | None = None,
) -> Outcome:
    """Broadcast, ask ``cohort``, sum the weighted replies, step the server; again, where it takes two exchanges.

    Replies are summed by a fixed binary tree over positions in the cohort, so every engine gets the same bits.
    Replies that do not arrive are left out: the outcome holds the states of the clients whose replies did. A client
    that failed takes no place in the tree, and is not asked again.

    Args:
        recall: gives a client's state.
        weights: of *every* client of the federation.
        broadcast: gives what a server sends: :meth:`Algorithm.broadcast` for the work of this round.
        exchanges: how often clients are asked; the algorithm's own number by default.
    """
    if not cohort:
        return Outcome(server)
    if len(set(cohort)) < len(cohort):
        raise ValueError(f"A cohort names each client once; got {list(cohort)}.")
    outcome = Outcome(server)
    for _ in range(exchanges or algorithm.traits.exchanges):
        staged, failed = outcome.states, outcome.failures
        cohort = [cid for cid in cohort if cid not in failed] if failed else cohort
        states = States(cohort, partial(_recalled, staged, recall))
        outcome = _exchange(algorithm, outcome, cohort, engine, states, weights, broadcast)
    return outcome


def _recalled(staged: Mapping[ClientId, Any], recall: Callable[[ClientId], Any], cid: ClientId) -> Any:
    return staged[cid] if cid in staged else recall(cid)


def _exchange(
    algorithm: Algorithm[Any, Any, Any],
    before: Outcome,
    cohort: Sequence[ClientId],
    engine: Engine,
    states: Iterator[Any],
    weights: Mapping[ClientId, float],
    broadcast: Callable[[Any], Broadcast],
) -> Outcome:
    """Broadcast, ask, sum, step the server."""
    down = broadcast(before.server)
    gathered = _Gathered(before, cohort, weights, algorithm.bytes_down(down))
    for reply in engine.ask(partial(_client_step, algorithm), states, down, cohort):
        if isinstance(reply, Failure):
            gathered.lose(reply)
        elif isinstance(reply, Summed):
            gathered.add_summed(reply)
        else:
            gathered.add(reply if isinstance(reply, Replies) else Replies.of(reply))
    total = gathered.total(down)
    return (
        gathered.outcome
        if total is None
        else replace(gathered.outcome, server=_server_step(algorithm, before.server, total))
    )


class _Gathered:
    """The replies of an exchange, in the order of the cohort: their sum, and each client's new state."""

    def __init__(
        self, before: Outcome, cohort: Sequence[ClientId], weights: Mapping[ClientId, float], bytes_down: int
    ) -> None:
        self.before, self.weights, self.bytes_down = before, weights, bytes_down
        self.cohort, self.waiting = cohort, list(cohort)
        self.sum, self.arrived = TreeSum(), list[ClientId]()
        self._summed: Summed | None = None
        staged = {
            name: dict(getattr(before, name)) for name in ("states", "local_models", "losses", "costs", "failures")
        }
        self.outcome = replace(before, **staged)
        self._last = Cost()

    def add(self, part: Replies) -> None:
        """Take the replies of the next clients."""
        ids, self.waiting = self.waiting[: len(part.states)], self.waiting[len(part.states) :]
        here = list(zip(ids, part.arrived, strict=True))
        self.sum.add(part.message, [self.weights[cid] if arrived else None for cid, arrived in here])
        whole, models = num_bytes(part.message) // len(ids), part.x_i.unbind()
        for i, (cid, arrived) in enumerate(here):
            sent = whole if (own := part.bytes_up[i]) is None else own
            self._bill(cid, (self.bytes_down, sent * arrived, part.steps[i], part.gradients[i]))
            if arrived:
                self._keep(cid, part.states[i], part.losses[i], part.steps[i], models[i])

    def add_summed(self, part: Summed) -> None:
        """Take the replies of the whole cohort, of which the sum is known."""
        self._summed, self.waiting = part, []
        for cid, reply in zip(self.cohort, part.replies, strict=True):
            self._bill(cid, (self.bytes_down, (reply.bytes_up or 0) * reply.arrived, reply.steps, reply.gradients))
            if reply.arrived:
                self._keep(cid, reply.state, reply.loss, reply.steps, reply.x_i)

    def lose(self, failure: Failure) -> None:
        """The next client has failed."""
        cid, *self.waiting = self.waiting
        self._bill(cid, (self.bytes_down * failure.sent, 0, failure.steps, 0))
        self.outcome.failures[cid] = failure

    def _bill(self, cid: ClientId, spent: tuple[int, int, int, int]) -> None:
        last, costs, before = self._last, self.outcome.costs, self.before.costs
        if spent != (last.bytes_down, last.bytes_up, last.steps, last.gradients):  # most clients spend the same
            self._last = Cost(*spent)
        costs[cid] = before[cid] + self._last if cid in before else self._last

    def _keep(self, cid: ClientId, state: Any, loss: float, steps: int, model: Tensor | None) -> None:
        outcome, before = self.outcome, self.before
        self.arrived.append(cid)
        outcome.states[cid] = state
        idle = not steps and cid in before.local_models  # an exchange without local steps keeps the model
        if model is not None:
            outcome.local_models[cid] = before.local_models[cid] if idle else model
        outcome.losses[cid] = before.losses.get(cid, loss) if loss != loss else loss

    def total(self, down: Broadcast) -> Total[Any] | None:
        """The weighted sum of the messages that arrived; None if none did."""
        if self.waiting:
            answered = len(self.cohort) - len(self.waiting)
            raise ValueError(f"The engine answered for {answered} of {len(self.cohort)} clients.")
        if not self.arrived:
            return None
        weight = sum(self.weights[cid] for cid in self.arrived)
        found = self.sum.value() if self._summed is None else self._summed.sum
        return Total(found, weight, len(self.arrived), sum(self.weights.values()), down)


def _server_step(algorithm: Algorithm[Any, Any, Any], server: Any, total: Total[Any]) -> Any:
    server = algorithm.server_step(server, total)
    if not isinstance(getattr(server, "x_bar", None), Tensor):
        raise TypeError(f"{type(algorithm).__name__}.server_step must return a record with x_bar, got {server!r}.")
    return server


def _client_step(algorithm: Algorithm[Any, Any, Any], client: Any, down: Broadcast, local: Local) -> Reply[Any, Any]:
    reply = algorithm.client_step(client, down, local)
    if not isinstance(reply, Reply):
        raise TypeError(f"{type(algorithm).__name__}.client_step must return a Reply, got {reply!r}.")
    return reply
