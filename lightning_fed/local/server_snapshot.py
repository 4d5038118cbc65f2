"""Snapshot the server's module, optimisers and schedulers, and restore them for one client after another."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from lightning_fed.core.personal import Personal
from lightning_fed.lightning import checkpoint_connector, pl
from lightning_fed.trainer.module_state import Changes, ModuleState, state_dict_with

#: Settings of optimisers that schedulers set. Others, such as an optimiser's counters, belong to its state.
SCHEDULED = ("lr", "initial_lr", "momentum", "betas", "weight_decay")


@dataclass(frozen=True, eq=False)
class Schedule:
    """Learning rates and other settings of optimisers: groups by optimiser, states of schedulers."""

    groups: list[list[dict[str, Any]]]
    schedulers: list[dict[str, Any]]

    @classmethod
    def of(cls, trainer: pl.Trainer) -> Schedule:
        groups = [[_settings(group) for group in optimizer.param_groups] for optimizer in trainer.optimizers]
        return cls(groups, [copy.deepcopy(config.scheduler.state_dict()) for config in trainer.lr_scheduler_configs])

    def scheduled_by(self, visit: Schedule) -> Schedule:
        """Return the same schedule, with the settings that schedulers set taken from a visit."""
        pairs = zip(self.groups, visit.groups, strict=True)
        groups = [[_scheduled(*pair) for pair in zip(old, new, strict=True)] for old, new in pairs]
        return Schedule(groups, visit.schedulers)

    def install(self, trainer: pl.Trainer) -> None:
        for optimizer, groups in zip(trainer.optimizers, self.groups, strict=True):
            del optimizer.param_groups[len(groups) :]
            for group, saved in zip(optimizer.param_groups, groups, strict=True):
                for key in group.keys() - saved.keys() - {"params"}:
                    del group[key]
                group.update(_copied(saved))
        for config, state in zip(trainer.lr_scheduler_configs, self.schedulers, strict=True):
            config.scheduler.load_state_dict(copy.deepcopy(state))


@dataclass(frozen=True, eq=False)
class Left:
    """The changes that a visit leaves in the module and the trainer, besides its reply.

    ``shared`` and ``own`` hold its buffers, frozen parameters that changed, and personal parameters: those that the
    server may average, and those that the client keeps to itself. ``steps`` counts optimiser steps.
    """

    shared: Mapping[str, Tensor]
    own: Mapping[str, Tensor]
    changes: Changes
    schedule: Schedule
    batches: int
    steps: int


class Workspace:
    """A snapshot of everything that a visit may change, taken before the first visit of a round.

    Between clients all parameters are restored, frozen ones included, all buffers and all plain attributes: a reply
    must not depend on earlier visits. Optimisers start every visit from the state that they had before the round,
    schedulers from the server's.

    Args:
        copies: copies of frozen parameters from an earlier round.
        personal: the parameters and buffers that clients keep to themselves.
        keeps_buffers: whether clients keep all buffers to themselves.
    """

    def __init__(
        self,
        trainer: pl.Trainer,
        copies: Mapping[str, Tensor] | None = None,
        personal: Personal = Personal(),  # noqa: B008  # frozen
        keeps_buffers: bool = False,
    ) -> None:
        self.trainer, self.module = trainer, trainer.lightning_module
        self.personal, self._keeps_buffers = personal, keeps_buffers
        schedulers = [config.scheduler for config in trainer.lr_scheduler_configs]
        self.state = ModuleState(self.module, [*trainer.optimizers, *schedulers], copies=copies)
        for optimizer in trainer.optimizers:
            self.state.attributes.note_optimizer(optimizer)
        self.schedule = Schedule.of(trainer)
        self._optimizers = [(optimizer, _memory(optimizer)) for optimizer in trainer.optimizers]

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The server's buffers."""
        return self.state.buffers

    def reset(self, state: Mapping[str, Tensor] | None = None) -> None:
        """Restore everything; ``state`` replaces buffers and parameters of the same name."""
        for p in self.module.parameters():
            p.grad = None
        self.state.restore(state)
        for optimizer, memory in self._optimizers:
            optimizer.state.clear()
            optimizer.state.update({p: _copied(own) for p, own in memory.items()})
        self.schedule.install(self.trainer)

    def own(self, state: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """Those of buffers and parameters that a client keeps to itself."""
        return state if self._keeps_buffers else self.personal.part(state)

    @cached_property
    def unchanged(self) -> Left:
        """The `Left` of a visit that changed only its parameters."""
        return Left(self.buffers, {}, Changes({}, []), self.schedule, 0, 0)

    def left(self, batches: int, steps: int, given: Sequence[str] = ()) -> Left:
        """Collect the changes of the visit that has just ended; ``given`` are attributes that a callback set for it."""
        for optimizer, groups in zip(self.trainer.optimizers, self.schedule.groups, strict=True):
            if len(optimizer.param_groups) != len(groups):
                raise ValueError(
                    f"training added a group of parameters to {type(optimizer).__name__}. Add it in"
                    " configure_optimizers, or between rounds, as BaseFinetuning does."
                )
        changes = self.state.attributes.changes()
        changes = replace(changes, names=[name for name in changes.names if name not in given])
        moved = self.state.moved(self.personal)
        shared = {} if self._keeps_buffers else self.personal.rest(moved)
        return Left(shared, self.own(moved), changes, Schedule.of(self.trainer), batches, steps)

    def state_dict(self) -> dict[str, Any]:
        """The module's state dict with the server's tensors, for a checkpoint that is taken during a visit."""
        return state_dict_with(self.module, {**self.state.parameters, **self.buffers})

    def server_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        """Write the server's optimisers and schedulers into a checkpoint that is taken during a visit."""
        saved_states = checkpoint.get("optimizer_states", [])
        for (optimizer, memory), groups, saved in zip(
            self._optimizers, self.schedule.groups, saved_states, strict=True
        ):
            index = {p: i for i, p in enumerate(p for g in optimizer.param_groups for p in g["params"])}
            saved["state"] = {index[p]: _copied(own) for p, own in memory.items()}
            for group, kept in zip(saved["param_groups"], groups, strict=True):
                group.update(_copied(kept))
        if "lr_schedulers" in checkpoint:
            checkpoint["lr_schedulers"] = copy.deepcopy(self.schedule.schedulers)


@contextmanager
def saving_the_server(trainer: pl.Trainer, workspace: Workspace) -> Iterator[None]:
    """Make checkpoints inside a with block hold the server's weights and count rounds, also during a visit."""
    loop: Any = trainer.fit_loop
    connector, clock = checkpoint_connector(trainer), loop.clock
    dump = connector.dump_checkpoint

    def counting_rounds(*args: Any, **kwargs: Any) -> Any:
        with clock.turned(False):
            return dump(*args, **kwargs)

    vars(trainer.strategy)["lightning_module_state_dict"] = workspace.state_dict
    vars(connector)["dump_checkpoint"] = counting_rounds
    try:
        yield
    finally:
        vars(trainer.strategy).pop("lightning_module_state_dict", None)
        vars(connector).pop("dump_checkpoint", None)


def _scheduled(old: dict[str, Any], new: dict[str, Any]) -> dict[str, Any]:
    return {**old, **{key: new[key] for key in SCHEDULED if key in new}}


def _memory(optimizer: Optimizer) -> dict[Any, dict[str, Any]]:
    return {p: _copied(state) for p, state in optimizer.state.items()}


def _settings(group: Mapping[str, Any]) -> dict[str, Any]:
    return _copied({key: value for key, value in group.items() if key != "params"})


def _copied(values: Mapping[str, Any]) -> dict[str, Any]:
    return {k: v.detach().clone() if isinstance(v, Tensor) else copy.deepcopy(v) for k, v in values.items()}
