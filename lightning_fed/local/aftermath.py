"""Process what visits leave in the module besides their replies: buffers, schedules, changed attributes."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Mapping
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from lightning_fed.core.algorithm import num_bytes
from lightning_fed.core.federation import Federation
from lightning_fed.core.layout import average_buffers
from lightning_fed.core.memory import ClientId, Cost
from lightning_fed.core.round import Outcome
from lightning_fed.local.server_snapshot import Left, Schedule, Workspace


def with_average(
    federation: Federation, outcome: Outcome, workspace: Workspace, left: Mapping[ClientId, Left]
) -> tuple[Outcome, dict[str, Tensor] | None]:
    """Average buffers, and frozen parameters that changed, over the clients whose replies arrived; bill their bytes.

    For a client that did not change such a parameter, the average takes the server's value. Personal buffers of the
    server stay as they are.
    """
    states = {cid: dict(own.shared) for cid, own in left.items()}
    down = num_bytes(federation.personal.rest(federation.buffers))
    up = {cid: num_bytes(states[cid]) if cid in outcome.states else 0 for cid in outcome.costs}
    costs = {cid: cost + Cost(down, up[cid]) for cid, cost in outcome.costs.items()}
    outcome = replace(outcome, costs=costs)
    arrived = {cid: states[cid] for cid in outcome.states}
    if not any(arrived.values()):
        return outcome, None
    moved = {name for state in arrived.values() for name in state}.intersection(workspace.state.parameters)
    server = {name: workspace.state.parameters[name] for name in moved}
    mean = average_buffers((federation.weights[cid], {**server, **state}) for cid, state in arrived.items())
    return outcome, {**federation.personal.part(workspace.buffers), **mean}


def advanced(workspace: Workspace, left: Collection[Left], restart: bool) -> tuple[Schedule, int]:
    """Return the server's schedules after a round, and the number of steps by which local time advances.

    Learning rates are those at the end of the longest visit; schedulers by step continue from there to the T-th step.
    With manual optimisation the number of steps is that of the longest visit, because the module decides it.
    """
    trainer, before = workspace.trainer, workspace.schedule
    rounds: Any = trainer.fit_loop.epoch_loop
    clock, loop = rounds.clock, rounds.client_loop
    longest = max(left, key=lambda own: own.batches, default=workspace.unchanged)
    manual = longest.batches > 0 and not trainer.lightning_module.automatic_optimization
    steps = longest.steps if manual else clock.steps
    if restart:
        return before, steps
    schedule = before.scheduled_by(longest.schedule)
    if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
        workspace.reset()
        schedule.install(trainer)
        for _ in loop.scheduled(longest.batches):
            pass
        schedule = Schedule.of(trainer)
    return schedule, steps


class AttributeWarnings:
    """Warns once of every attribute that visits change, or that cannot be restored between them."""

    def __init__(self) -> None:
        self._told: set[str] = set()

    def not_copied(self, workspace: Workspace) -> None:
        for name, reason in workspace.state.attributes.not_copied.items():
            self._warn(
                name,
                f"The attribute {described(workspace.module, name)} cannot be copied ({reason}), so changes of it in"
                " one visit reach the next visit. Replies are right as long as training does not depend on it.",
            )

    def dropped(self, workspace: Workspace, left: Collection[Left]) -> None:
        for changes in (own.changes for own in left):
            for name in changes.names:
                short = name.rpartition(".")[2]
                remedy = f'To keep it, register a buffer: self.register_buffer("{short}", ...).'
                if name in changes.streams:
                    remedy = (
                        "Draw from torch's own generator instead, which is seeded by round and client, or keep the"
                        " generator's state in a buffer (self.register_buffer)."
                    )
                self._warn(
                    name,
                    f"Training changes the attribute {described(workspace.module, name)}. Every visit starts from the"
                    f" module as it was at the beginning of the round, so the change is dropped. {remedy}",
                )

    def drew(self, client: ClientId | None) -> None:
        if client is not None:
            self._warn(
                "the data",
                f"The data of client {client!r} draw from a random generator of their own. Its numbers depend on"
                " earlier visits, and differ in a resumed run. Draw from torch's, NumPy's or Python's global generators"
                " instead: they are seeded by round and client.",
            )

    def _warn(self, name: str, text: str) -> None:
        if name not in self._told:
            self._told.add(name)
            warnings.warn(text, stacklevel=4)


def described(module: nn.Module, name: str) -> str:
    """Describe an attribute by its name, the class of its submodule, and the submodule's path."""
    path, _, key = name.rpartition(".")
    return f"{key} of {type(module.get_submodule(path)).__name__}" + (f" ({path})" if path else "")
