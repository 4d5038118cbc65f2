"""What a visit in another process tells this one: the reply, what it logged, and what it left in the module.

Worker processes send it to their parent, and ranks to each other.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import nn
from torchmetrics import Metric, MetricCollection

from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Reply
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.lightning import is_read_by_user, pl, set_results, update_count
from lightning_fed.local.server_snapshot import Left
from lightning_fed.trainer.data_streams import streams_of
from lightning_fed.trainer.hooks import Exactness, Visit, notify, reading
from lightning_fed.trainer.loops import RoundResults
from lightning_fed.trainer.merged_log import Logged
from lightning_fed.trainer.module_state import restore_state


@dataclass(frozen=True, eq=False)
class Answer:
    """The reply of one client, and the changes of its visit; None for a visit that changed only its parameters."""

    client: ClientId
    reply: Reply[Any, Any]
    left: Left | None
    visit: dict[str, Any]  # attributes that the visit has set

    @classmethod
    def of(cls, alone: SequentialEngine, visit: Visit, reply: Reply[Any, Any], whole: bool) -> Answer:
        """The answer of a visit that has just ended in this process; ``whole`` with the terms of its last problem."""
        facts = {name: getattr(visit, name) for name in ("step", "optimizer_steps", "planned", "work", "loss")}
        facts["certificate"] = visit.certificate and Exactness(visit.certificate.residual, visit.certificate.limit)
        if whole:
            facts["question"] = visit.question
        left = alone.left[visit.client]
        return cls(visit.client, reply, None if left is alone.workspace.unchanged else left, facts)

    def take(self, alone: SequentialEngine, visit: Visit) -> None:
        """Apply the effects of a visit in another process to this one, and notify callbacks of its end."""
        trainer, left = alone.loop.trainer, alone.workspace.unchanged if self.left is None else self.left
        alone.take(visit.client, self.reply, left)
        vars(visit).update(self.visit)
        for optimizer in trainer.optimizers:
            vars(optimizer)["_opt_called"] = True  # it stepped elsewhere; schedulers warn if no step came before
        if reading(trainer, "on_client_end"):
            model = {**alone.workspace.buffers, **left.shared, **left.own, **alone.layout.split(self.reply.x_i)}
            restore_state(trainer.lightning_module, model)
        notify(trainer, "on_client_end", visit, self.reply)


class Recording:
    """What the next visits log and do to metrics, apart from earlier values, which another process has.

    Leaves the trainer changed; a process that goes on restores it (see :class:`LogSnapshot`).
    """

    def __init__(self, alone: SequentialEngine, visits: Sequence[Visit]) -> None:
        trainer, self._module = alone.loop.trainer, alone.loop.trainer.lightning_module
        self._results = RoundResults(training=True)
        set_results(trainer, self._results)
        self._found = _watch(trainer)
        for part in self._module.modules():
            if isinstance(part, Metric):
                part.reset()
        self._loose = alone.workspace.state.attributes.loose_metrics
        self._updates = _updates(self._loose)
        data: Any = trainer.datamodule  # type: ignore[attr-defined]
        self._streams = [stream for visit in visits for stream in streams_of(data, visit.client)]

    def obstacle(self) -> str | None:
        """Why what was logged cannot be merged with what other processes have logged; None if it can."""
        _share_states(self._module)
        if self._updates != _updates(self._loose):
            self._found.append("training updates a metric that is not part of the module")
        if any(stream.changed() for stream in self._streams):
            self._found.append("training draws from a random generator of the data")
        return next(iter(self._found), None)

    def logged(self) -> Logged:
        """Everything that was logged since."""
        return Logged.of(self._results, self._module)


def _watch(trainer: pl.Trainer) -> list[str]:
    """In the child: note if training reads a metric gathered over clients, or writes to a logger itself."""
    found: list[str] = []
    for name, part in trainer.lightning_module.named_modules():
        if isinstance(part, Metric):
            vars(part)["compute"] = partial(_computed, part, part.compute, name, found)
    stand_ins: list[Any] = [_Logger(found) for _ in trainer.loggers]
    trainer.loggers = stand_ins
    return found


def _updates(metrics: Sequence[Any]) -> list[int]:
    """How often metrics have been updated."""
    return [update_count(part) for metric in metrics for part in metric.modules() if isinstance(part, Metric)]


def _share_states(module: nn.Module) -> None:
    """Copy states within metric collections: torchmetrics updates only the first metric of a compute group."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.items(copy_state=True)


def _computed(metric: Metric, compute: Callable[[], Any], name: str, found: list[str]) -> Any:
    if is_read_by_user(metric):
        found.append(f"training reads the value of {name}, gathered from clients before")
    return compute()


class _Logger:
    """Replaces a logger in the child, because only the parent may write to it."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        self._found.append(f"training writes to the logger itself ({name})")
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        return None
