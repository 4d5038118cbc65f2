"""Play a round in the trainer's module, commit it, and hand the module back."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor

from lightning_fed.core.commit import Commit
from lightning_fed.core.failures import RAISE, Failure, FailurePolicy
from lightning_fed.core.federation import Federation
from lightning_fed.core.heap import release_memory
from lightning_fed.core.layout import buffers_of, overwrite, parameters_of
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import seed_global
from lightning_fed.core.round import Engine, Outcome
from lightning_fed.engines.failed_clients import FailedClients, TooFewClientsError
from lightning_fed.engines.faults import dropped_out, faults_of, place
from lightning_fed.engines.ranks import RanksEngine
from lightning_fed.engines.selection import Choice, Setting
from lightning_fed.engines.sequential import ClientError, SequentialEngine
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.engines.workers import WorkersEngine
from lightning_fed.lightning import pl
from lightning_fed.local.aftermath import AttributeWarnings, advanced, with_average
from lightning_fed.local.schedule import planned_batches
from lightning_fed.local.server_snapshot import Schedule, Workspace, saving_the_server
from lightning_fed.local.step_sizes import StepSizePlan
from lightning_fed.sampling import Sampler
from lightning_fed.trainer.eligibility import why_not_merged
from lightning_fed.trainer.hooks import listening, notify
from lightning_fed.trainer.log_snapshot import LogSnapshot
from lightning_fed.trainer.module_state import restore_state, state_dict_with
from lightning_fed.trainer.ranks import ranks_of

Buffers = Literal["average", "server", "local"]


@dataclass(frozen=True, eq=False)
class RoundSettings:
    """Settings of the rounds of a fit.

    Args:
        work: local work of a visit.
        sampler: draws cohorts.
        buffers: ``average`` them over the cohort, keep those of the ``server``, or let clients keep their own.
        restart_schedulers: start schedulers by step anew in every visit.
        policy: what becomes of clients that fail.
    """

    work: LocalWork
    sampler: Sampler
    buffers: Buffers
    restart_schedulers: bool
    policy: FailurePolicy = RAISE


class RoundPlayer:
    """Plays rounds of a federation in a trainer's module.

    ``workspace`` is the server's snapshot while a round is played, None between rounds.
    """

    def __init__(self, trainer: pl.Trainer, federation: Federation, settings: RoundSettings, choice: Choice) -> None:
        self.trainer, self.federation, self.settings = trainer, federation, settings
        self.workspace: Workspace | None = None
        self._choice, self._warnings = choice, AttributeWarnings()
        self._step_sizes: StepSizePlan | None = None
        self._samples: Mapping[ClientId, float] | None = None
        self._frozen: Mapping[str, Tensor] = {}  # copies of frozen parameters
        self.failed = FailedClients(federation)
        self.rehearsal = 0.0  # seconds that callbacks have taken in on_round_played of the last round

    def begin_fit(self, settings: RoundSettings) -> None:
        """Plan visits again, because data, limits and the global seed may differ in this fit."""
        self.settings, self._step_sizes, self._samples = settings, None, None

    def play(self, cohort: Sequence[ClientId]) -> Outcome:
        """Play and commit a round; also after an error, the module holds the server's last committed model."""
        federation, before = self.federation, self.federation.rounds_done
        local, personal = self.settings.buffers == "local", federation.personal
        workspace = self.workspace = Workspace(self.trainer, self._frozen, personal, local)
        self._frozen = workspace.state.frozen
        loop: Any = self.trainer.fit_loop.epoch_loop.client_loop
        kept = federation.store if local or personal else None
        alone = SequentialEngine(loop, workspace, federation.layout, before, kept, self.settings.policy)
        self._warnings.not_copied(workspace)
        schedule = workspace.schedule
        try:
            outcome, average = self._averaged(self._survivors(cohort, alone), alone)
            own = {cid: left.own for cid, left in alone.left.items() if cid in outcome.states}
            schedule, steps = self._advanced(alone)
            commit = federation.prepare(outcome, average, own, steps)
            ahead = self._rehearse(alone.workspace, commit)
            federation.apply(commit)
            federation.stationarity = ahead.stationarity
        finally:
            federation.settle()
            self._hand_back(alone, schedule, committed=federation.rounds_done > before)
            release_memory(federation.x0)
        return outcome

    def show_server(self) -> None:
        """Load the server's model into the module."""
        self._show(self.federation.server.x_bar)

    def _show(self, x_bar: Tensor) -> None:
        """Load a server's model into the module, with the personal part that the first model had."""
        module, values = self.trainer.lightning_module, self.federation.layout.split(x_bar)
        overwrite(parameters_of(module), values)
        if self.federation.first:
            restore_state(module, {**buffers_of(module), **self.federation.first})

    def model_of(self, cid: ClientId, own: bool) -> dict[str, Any]:
        """A state dict of the server's model with a client's personal part, or of the client's ``own`` model."""
        federation, module = self.federation, self.trainer.lightning_module
        server = parameters_of(module) if self.workspace is None else self.workspace.state.parameters
        part, x = federation.part_of(cid), federation.server.x_bar
        if own:
            part, x = {**federation.store[cid].buffers, **part}, self._own_model(cid)
        return state_dict_with(module, {**server, **federation.buffers, **part, **federation.layout.split(x)})

    def _own_model(self, cid: ClientId) -> Tensor:
        algorithm = self.federation.algorithm
        if (x_i := algorithm.local_model(self.federation.recall(cid))) is None:
            name = type(algorithm).__name__
            raise ValueError(f"Clients of {name} keep no model of their own. Use own=False for the server's model.")
        return x_i

    def _survivors(self, cohort: Sequence[ClientId], alone: SequentialEngine) -> Outcome:
        """The outcome of a round without the clients that fail in it, as if they had not been drawn."""
        policy, round = self.settings.policy, self.federation.rounds_done
        alone.faults = faults_of(self.trainer, round, cohort)
        away = dropped_out(round, alone.faults)
        if away and not policy.skips:
            raise ClientError(f"{next(iter(away.values())).reason} {policy.consequence}")
        undoes, loose = policy.skips or policy.min_clients, alone.workspace.state.attributes.loose_metrics
        log = LogSnapshot(self.trainer, loose) if undoes else None
        while True:
            present = [cid for cid in cohort if cid not in away]
            self._check_enough(len(present), away)
            outcome = self._ask(present, alone)
            failures = {**away, **outcome.failures}
            late = {cid: failure for cid, failure in outcome.failures.items() if cid in outcome.states}
            self.failed.tell(outcome.failures)
            if late or policy.is_short(len(outcome.states), failures):
                assert log is not None  # otherwise a failure is an error
                alone.forget()
                log.restore()
            if not late:
                self._check_enough(len(outcome.states), failures)
                return replace(outcome, failures=failures)
            away |= late  # the server has counted a message of theirs: play again without them

    def _check_enough(self, replies: int, failures: Mapping[ClientId, Failure]) -> None:
        """Refuse a round with too few replies."""
        policy = self.settings.policy
        if policy.is_short(replies, failures):
            first = next((f" The first of them: {failure.reason}" for failure in failures.values()), "")
            raise TooFewClientsError(
                f"{place(self.federation.rounds_done)}: {replies} clients to go on with, {len(failures)} failed, and"
                f" min_clients is {policy.min_clients or 1}.{first}",
                failures,
            )

    def _ask(self, cohort: Sequence[ClientId], alone: SequentialEngine) -> Outcome:
        """Ask the cohort, and warn of changes that its visits made to attributes of the module."""
        workspace = alone.workspace
        engine = self._choice.engine(alone, self._setting(), cohort)
        if cohort and ranks_of(self.trainer).size > 1:
            engine = self._shared(engine, alone)
        work = self.settings.work
        if self.federation.algorithm.traits.plans_steps:
            work = replace(work, lr_sum=self._plan().lr_sum(alone.loop, workspace))
        kept = None if alone.kept is None else lambda cid: alone.left[cid].own
        with saving_the_server(self.trainer, workspace):
            outcome = self.federation.play(cohort, engine, work, kept)
        self._warnings.dropped(workspace, alone.left.values())
        self._warnings.drew(alone.drew)
        return outcome

    def _shared(self, engine: Engine, alone: SequentialEngine) -> RanksEngine:
        """The engine of a round whose cohort several processes share."""
        federation, ranks = self.federation, ranks_of(self.trainer)
        reason = why_not_merged(self.trainer)
        if isinstance(engine, WorkersEngine):
            reason = f"workers={self._choice.workers} would fork each of them"
        if reason is not None:
            raise ValueError(f"A fit in {ranks.size} processes is impossible here: {reason}. Use devices=1.")
        inner = engine if isinstance(engine, VectorizedEngine) else None
        ranks.doing = place(federation.rounds_done)
        return RanksEngine(alone, inner, ranks, self._loads(), federation.weights, federation.store)

    def _loads(self) -> Mapping[ClientId, float]:
        """Samples that a visit of each client takes, which says how long it is."""
        if self._samples is None:
            batches = planned_batches(self.trainer, self.settings.work)
            size, examples = self._setting().batch_size, self.federation.examples
            self._samples = {cid: n * min(size, examples.get(cid, size)) for cid, n in batches.items()}
        return self._samples

    def _plan(self) -> StepSizePlan:
        if self._step_sizes is None:
            batches = planned_batches(self.trainer, self.settings.work)
            self._step_sizes = StepSizePlan(batches, self.federation.weights)
        return self._step_sizes

    def _setting(self) -> Setting:
        settings, examples = self.settings, self.federation.examples
        cohort = round(float(settings.sampler.inclusion_probabilities(len(examples)).sum()))
        size = self.trainer.datamodule.batch_size  # type: ignore[attr-defined]
        keeps_buffers = settings.buffers == "local"
        return Setting(examples, size, cohort, settings.work, keeps_buffers, tuple(self.federation.first))

    def _averaged(self, outcome: Outcome, alone: SequentialEngine) -> tuple[Outcome, dict[str, Tensor] | None]:
        """Add the bytes of buffers to the outcome, and average them; None if buffers are not averaged."""
        if self.settings.buffers != "average":
            return outcome, None
        return with_average(self.federation, outcome, alone.workspace, alone.left)

    def _advanced(self, alone: SequentialEngine) -> tuple[Schedule, int]:
        """Schedules after the round, and steps by which local time advances; 0 for a full start, which is no round."""
        if not self.federation.started:
            return alone.workspace.schedule, 0
        return advanced(alone.workspace, alone.left.values(), self.settings.restart_schedulers)

    def _rehearse(self, workspace: Workspace, commit: Commit) -> Federation:
        """Have callbacks look at the federation before the round counts, as they would see it afterwards."""
        federation, module, began = self.federation, self.trainer.lightning_module, time.monotonic()
        ahead = federation.after(commit)
        if federation.started and listening(self.trainer, "on_round_played"):
            workspace.reset()
            restore_state(module, ahead.buffers)
            self._show(ahead.server.x_bar)
            seed_global(self.settings.work.seed, ahead.rounds_done, "server")
            before = federation.local_time
            federation.local_time = ahead.local_time
            federation.played = {cid: memory.buffers for cid, memory in commit.memories.items()}
            try:
                notify(self.trainer, "on_round_played", federation.rounds_done, ahead)
            finally:
                federation.local_time, federation.played = before, {}
        self.rehearsal = time.monotonic() - began
        return ahead

    def _hand_back(self, alone: SequentialEngine, schedule: Schedule, committed: bool) -> None:
        """Restore the module to the server's state."""
        workspace = alone.workspace
        if committed:
            workspace.schedule = schedule
        workspace.reset()
        restore_state(self.trainer.lightning_module, self.federation.buffers)
        if committed:
            for appended in alone.joined:
                workspace.state.attributes.append(appended)
        self.workspace = None
        self.show_server()
        seed_global(self.settings.work.seed, self.federation.rounds_done, "server")
