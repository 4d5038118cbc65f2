"""One communication round, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

from torch import Tensor
from torch.utils import _pytree as pytree

from lightning_fed.core import Algorithm, Broadcast, Local, Reply, Total, add, num_bytes, wide
from lightning_fed.store import ClientId, Cost

Step = Callable[..., Reply[Any, Any]]


class Engine(Protocol):
    """Asks clients; replies come back in the order of the cohort."""

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any]]: ...


@dataclass(frozen=True, eq=False)
class Outcome:
    """What a round would change. Nothing has moved yet: server and clients are committed together, by the caller."""

    server: Any
    states: dict[ClientId, Any] = field(default_factory=dict)
    local_models: dict[ClientId, Tensor] = field(default_factory=dict)
    losses: dict[ClientId, float] = field(default_factory=dict)
    costs: dict[ClientId, Cost] = field(default_factory=dict)

    @property
    def cost(self) -> Cost:
        """What all clients have spent together."""
        return sum(self.costs.values(), Cost())

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
    exchanges: int | None = None,
    down: Broadcast | None = None,
) -> Outcome:
    """Broadcast, ask ``cohort``, sum the weighted answers in its order, step the server; again, where it takes two.

    ``recall`` gives a client's state, ``weights`` the weight of *every* client of the federation. ``exchanges`` is the
    algorithm's own number by default, ``down`` the broadcast of today's server.
    """
    if not cohort:
        return Outcome(server)
    if len(set(cohort)) < len(cohort):
        raise ValueError(f"A cohort names each client once; got {list(cohort)}.")
    outcome = Outcome(server)
    for _ in range(exchanges or algorithm.exchanges_per_round):
        staged = outcome.states
        states = (staged[cid] if cid in staged else recall(cid) for cid in cohort)
        outcome = _exchange(algorithm, outcome, cohort, engine, states, weights, down)
    return outcome


def _exchange(
    algorithm: Algorithm[Any, Any, Any],
    before: Outcome,
    cohort: Sequence[ClientId],
    engine: Engine,
    states: Iterator[Any],
    weights: Mapping[ClientId, float],
    down: Broadcast | None,
) -> Outcome:
    down = algorithm.broadcast(before.server) if down is None else down
    outcome, total = Outcome(before.server), None
    bytes_down = algorithm.bytes_down(down)
    replies = engine.ask(partial(_client_step, algorithm), states, down, cohort)
    for cid, reply in zip(cohort, replies, strict=True):
        share = pytree.tree_map(lambda leaf, w=weights[cid]: wide(leaf) * w, reply.message)
        total = share if total is None else add(total, share)
        bytes_up = num_bytes(reply.message) if reply.bytes_up is None else reply.bytes_up
        cost = Cost(bytes_down, bytes_up, reply.steps, reply.gradients)
        outcome.costs[cid] = before.costs.get(cid, Cost()) + cost
        outcome.states[cid] = reply.state
        idle = not reply.steps and cid in before.local_models  # only asked for something: its model is the one before
        outcome.local_models[cid] = before.local_models[cid] if idle else reply.x_i
        outcome.losses[cid] = before.losses.get(cid, reply.loss) if reply.loss != reply.loss else reply.loss
    weight = sum(weights[cid] for cid in cohort)
    answered = Total(total, weight, len(cohort), sum(weights.values()))
    server = algorithm.server_step(before.server, answered)
    if not isinstance(getattr(server, "x_bar", None), Tensor):
        raise TypeError(f"{type(algorithm).__name__}.server_step must return a record with x_bar, got {server!r}.")
    return replace(outcome, server=server)


def _client_step(algorithm: Algorithm[Any, Any, Any], client: Any, down: Broadcast, local: Local) -> Reply[Any, Any]:
    reply = algorithm.client_step(client, down, local)
    if not isinstance(reply, Reply):
        raise TypeError(f"{type(algorithm).__name__}.client_step must return a Reply, got {reply!r}.")
    return reply
