"""Hooks of a federation, in addition to Lightning's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from lightning_fed.core.failures import Failure, Fault
from lightning_fed.core.federation import Federation
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Reply
from lightning_fed.core.problem import Question
from lightning_fed.lightning import pl


@dataclass
class Exactness:
    """The norm of the local problem's gradient, and the largest norm that the tolerance allows."""

    residual: float
    limit: float

    @property
    def holds(self) -> bool:
        """Whether the last measured point is within the tolerance."""
        return self.residual <= self.limit


@dataclass
class Visit:
    """One client's visit in a round, and its progress.

    ``question`` holds the terms of its last local problem, ``certificate`` its exactness if there is a tolerance.
    ``lateness`` is by how many seconds the visit counts as longer than it is.

    >>> visit = Visit(round=3, client="ann", position=0, cohort=10)
    >>> f"round {visit.round}: client {visit.client}, {visit.position + 1} of {visit.cohort}"
    'round 3: client ann, 1 of 10'
    """

    round: int
    client: ClientId
    position: int
    cohort: int
    step: int = field(default=0, init=False)
    optimizer_steps: int = field(default=0, init=False)
    planned: int = field(default=0, init=False)
    work: float = 1.0
    loss: torch.Tensor | None = field(default=None, init=False)
    question: Question | None = field(default=None, init=False)
    certificate: Exactness | None = field(default=None, init=False)
    lateness: float = field(default=0.0, init=False)


@dataclass(frozen=True, eq=False)
class RoundReport:
    """What happened in a committed round.

    ``cohort`` is the one of the last of its ``attempts``; ``failures`` has the clients that failed in any of them.
    ``worst_clients`` has the worst client by metric, such as "test_loss", if the round was evaluated
    (:class:`~lightning_fed.callbacks.ClientEvaluation` fills it in ``on_round_end``).

    >>> report = RoundReport(round=3, cohort=["ann", "bob"], losses={"ann": 0.5, "bob": 1.5}, metrics={"clients": 2.0})
    >>> report.local_loss, report.logged
    (1.0, {'federated/clients': 2.0})
    """

    round: int
    cohort: list[ClientId]
    losses: dict[ClientId, float]
    metrics: dict[str, float]
    failures: dict[ClientId, Failure] = field(default_factory=dict)
    attempts: int = 1
    worst_clients: dict[str, ClientId] = field(default_factory=dict)

    @property
    def logged(self) -> dict[str, float]:
        """The metrics that are numbers, by the names that loggers get: ``federated/clients`` and so on."""
        return {f"federated/{name}": value for name, value in self.metrics.items() if value == value}

    @property
    def local_loss(self) -> float:
        """Mean of the local losses that were reported."""
        known = [loss for loss in self.losses.values() if loss == loss]
        return sum(known) / len(known) if known else float("nan")


class FederatedCallback(pl.Callback):
    """A Lightning callback with hooks for rounds and visits.

    Lightning's own hooks fire as well: ``on_train_epoch_start``, ``on_train_batch_start`` and their ends once per
    round, gradient hooks such as ``on_before_optimizer_step`` once per local step.

    ``reads_module`` is False for a callback that never reads the module in a hook about a visit, so that clients
    may be trained in stacks or worker processes; ``is_server`` is True for the callback that runs the federation.

    >>> class Printer(FederatedCallback):
    ...     reads_module = False
    ...
    ...     def on_round_end(self, trainer, module, report):
    ...         print(f"round {report.round}: loss {report.local_loss} of {report.cohort}")
    >>> report = RoundReport(round=3, cohort=["ann", "bob"], losses={"ann": 0.5, "bob": 1.5}, metrics={})
    >>> Printer().on_round_end(None, None, report)  # as a fit does after every round
    round 3: loss 1.0 of ['ann', 'bob']
    """

    reads_module = True
    is_server = False

    def log_round(self, metrics: dict[str, float]) -> None:
        """Log numbers about a round in full precision; omits NaN."""
        known = {name: torch.tensor(value, dtype=torch.float64) for name, value in metrics.items() if value == value}
        self.log_dict(known, batch_size=1)

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        """Before the first client of a round; the module holds the server's model."""

    def fault(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, client: ClientId) -> Fault | None:
        """How a client of the cohort is to fail in a round, for studies of robustness; None if it is not."""
        return None

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit) -> None:
        """Before a client's local work."""

    def on_client_step(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit) -> None:
        """After each local batch; ``visit.step`` and ``visit.loss`` are its number and loss."""

    def on_client_end(
        self, trainer: pl.Trainer, module: pl.LightningModule, visit: Visit, reply: Reply[Any, Any]
    ) -> None:
        """After a client's local work; the module holds the client's model. Nothing is committed yet."""

    def on_round_played(
        self, trainer: pl.Trainer, module: pl.LightningModule, round: int, federation: Federation
    ) -> None:
        """Before the round is committed; the module holds the server's new model. An error here undoes the round.

        ``federation`` is as it will be after the commit, for reading only.
        """

    def on_round_error(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, error: Exception) -> None:
        """After a round failed; it is not committed. May raise another error, which then ends the fit."""

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: RoundReport) -> None:
        """After the round is committed; the module holds the server's new model. May log with ``self.log``."""


def listening(trainer: pl.Trainer, hook: str) -> list[Any]:
    """The callbacks that override a federated hook."""
    nothing = getattr(FederatedCallback, hook)
    return [callback for callback in trainer.callbacks if getattr(type(callback), hook, nothing) is not nothing]


def notify(trainer: pl.Trainer, hook: str, *args: Any) -> None:
    """Call a federated hook on every callback that has it."""
    for callback in listening(trainer, hook):
        getattr(callback, hook)(trainer, trainer.lightning_module, *args)


@contextmanager
def telling_of_errors(trainer: pl.Trainer, round: int) -> Iterator[None]:
    """Tell callbacks of an error that ends a round, before Lightning handles it."""
    try:
        yield
    except Exception as error:
        notify(trainer, "on_round_error", round, error)
        raise


def reading(trainer: pl.Trainer, hook: str) -> list[Any]:
    """The callbacks that may read the module in a federated hook."""
    return [callback for callback in listening(trainer, hook) if getattr(callback, "reads_module", True)]


def is_server(callback: pl.Callback) -> bool:
    """Whether a callback is the server, which runs the federation."""
    return bool(getattr(callback, "is_server", False))
