"""One communication round, top to bottom."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm, Broadcast, Reply, Total, num_bytes, tree_map
from lightning_fed.core.memory import ClientId, Cost
from lightning_fed.core.problem import Local
from lightning_fed.core.summation import TreeSum

Step = Callable[..., Reply[Any, Any]]


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


class Engine(Protocol):
    """Asks clients; replies, of one or of several of them, come back in the order of the cohort."""

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any]] | Iterator[Replies]: ...


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
    exchanges: int | None = None,
    down: Broadcast | None = None,
) -> Outcome:
    """Broadcast, ask ``cohort``, sum the weighted answers, step the server; again, where it takes two.

    Answers are summed by a fixed binary tree over positions in the cohort: whoever gathers them gets the same bits.

    Answers that do not arrive are left out: the outcome holds the states of those whose did.

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
    outcome = replace(
        before,
        states=dict(before.states),
        local_models=dict(before.local_models),
        losses=dict(before.losses),
        costs=dict(before.costs),
    )
    bytes_down, total = algorithm.bytes_down(down), TreeSum()
    arrived: list[ClientId] = []
    waiting = list(cohort)
    last, cost = (0, 0, 0, 0), Cost()
    for reply in engine.ask(partial(_client_step, algorithm), states, down, cohort):
        part = reply if isinstance(reply, Replies) else Replies.of(reply)
        ids, waiting = waiting[: len(part.states)], waiting[len(part.states) :]
        total.add(part.message, [weights[cid] if here else None for cid, here in zip(ids, part.arrived, strict=True)])
        whole, models = num_bytes(part.message) // len(ids), part.x_i.unbind()
        for i, cid in enumerate(ids):
            here, sent, loss, steps = part.arrived[i], part.bytes_up[i], part.losses[i], part.steps[i]
            spent = bytes_down, (whole if sent is None else sent) * here, steps, part.gradients[i]
            if spent != last:  # most clients of a round spend the same
                last, cost = spent, Cost(*spent)
            outcome.costs[cid] = before.costs[cid] + cost if cid in before.costs else cost
            if not here:
                continue
            arrived.append(cid)
            outcome.states[cid] = part.states[i]
            idle = not steps and cid in before.local_models  # only asked for something: its model is the one before
            outcome.local_models[cid] = before.local_models[cid] if idle else models[i]
            outcome.losses[cid] = before.losses.get(cid, loss) if loss != loss else loss
    if waiting:
        raise ValueError(f"The engine answered for {len(cohort) - len(waiting)} of {len(cohort)} clients.")
    if not arrived:
        return outcome
    answered = Total(total.value(), sum(weights[cid] for cid in arrived), len(arrived), sum(weights.values()))
    server = algorithm.server_step(before.server, answered)
    if not isinstance(getattr(server, "x_bar", None), Tensor):
        raise TypeError(f"{type(algorithm).__name__}.server_step must return a record with x_bar, got {server!r}.")
    return replace(outcome, server=server)


def _stacked(*rows: Tensor) -> Tensor:
    return rows[0].unsqueeze(0) if len(rows) == 1 else torch.stack(rows)


def _client_step(algorithm: Algorithm[Any, Any, Any], client: Any, down: Broadcast, local: Local) -> Reply[Any, Any]:
    reply = algorithm.client_step(client, down, local)
    if not isinstance(reply, Reply):
        raise TypeError(f"{type(algorithm).__name__}.client_step must return a Reply, got {reply!r}.")
    return reply
