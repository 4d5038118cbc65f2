from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map_only
from torchmetrics import Metric, MetricCollection

from lightning_fed.core.layout import clones, overwrite, parameters_of
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.round import Step
from lightning_fed.engines.sequential import ClientError, DivergenceError, SequentialEngine
from lightning_fed.engines.shared_memory import Parcel
from lightning_fed.lightning import (
    ProgressBar,
    SIGTERMException,
    is_read_by_user,
    pl,
    set_results,
    update_count,
)
from lightning_fed.local.server_snapshot import Left
from lightning_fed.trainer.data_streams import streams_of
from lightning_fed.trainer.hooks import Exactness, Visit, listening, notify, reading
from lightning_fed.trainer.loops import RoundResults
from lightning_fed.trainer.merged_log import Logged

#: Clients whose answers may be under way at once: each takes two file descriptors.
TOGETHER = 128


@dataclass(frozen=True, eq=False)
class _Answer:
    """What comes back with a reply whose state is sent by itself."""

    reply: Reply[Any, Any]
    logged: Logged
    left: Left
    visit: dict[str, Any]  # what it has come to know
    alone: str | None  # why this visit needs a single process


class WorkersEngine:
    """Asks the clients of a cohort in processes beside this one, each a fork of it as it is at the round's beginning.

    A child inherits everything and so computes what this process would have; only replies come back.

    Args:
        alone: asks one client.
        workers: number of processes.
        give_up: called with a reason when a module turns out to need a single process.
    """

    def __init__(self, alone: SequentialEngine, workers: int, give_up: Callable[[str], None]) -> None:
        self.alone, self.workers, self.give_up = alone, workers, give_up

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any]]:
        known = list(states)
        visits = [Visit(self.alone.round, cid, i, len(cohort)) for i, cid in enumerate(cohort)]
        done = 0
        while done < len(visits) and self.workers > 1:
            done += yield from self._ask(step, known, down, visits, range(done, min(done + TOGETHER, len(visits))))
        for state, visit in zip(known[done:], visits[done:], strict=True):
            yield self.alone.visit(step, state, down, visit)

    def _ask(
        self, step: Step, known: list[Any], down: Broadcast, visits: list[Visit], share: Sequence[int]
    ) -> Generator[Reply[Any, Any], None, int]:
        """Yields the replies of a share of the cohort; returns how many (fewer if workers are abandoned)."""
        first = share[0]

        def task(i: int) -> tuple[Any, _Answer]:
            return self._answer(step, known[first + i], down, visits[first + i])

        def before(i: int) -> list[Tensor]:
            return [leaf for leaf in tree_leaves((known[first + i], down)) if isinstance(leaf, Tensor)]

        team = _Team(min(self.workers, len(share)), len(share), task, before)
        try:
            for i, visit in enumerate(visits[first : first + len(share)]):
                notify(self.trainer, "on_client_start", visit)
                try:
                    state, answer = team.receive(i, self.alone.where(visit.client))
                finally:
                    if self.trainer.received_sigterm:
                        raise SIGTERMException
                if answer.alone is not None:
                    self.workers = 1
                    self.give_up(answer.alone)
                    return i
                yield self._take(visit, replace(answer.reply, state=state), answer)
        finally:
            team.dismiss()
        return len(share)

    @property
    def trainer(self) -> pl.Trainer:
        return self.alone.loop.trainer

    def _take(self, visit: Visit, reply: Reply[Any, Any], answer: _Answer) -> Reply[Any, Any]:
        answer.logged.put_into(self.trainer)
        self.alone.take(visit.client, reply, _unpacked(answer.left))
        vars(visit).update(answer.visit)
        for optimizer in self.trainer.optimizers:
            vars(optimizer)["_opt_called"] = True  # elsewhere; schedulers look at it before they step
        if reading(self.trainer, "on_client_end"):
            overwrite(parameters_of(self.trainer.lightning_module), self.alone.layout.split(reply.x_i))
        notify(self.trainer, "on_client_end", visit, reply)
        return reply

    def _answer(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> tuple[Any, _Answer]:
        """In the child: one client's reply, and everything else its visit did."""
        trainer, module = self.trainer, self.trainer.lightning_module
        callbacks: list[pl.Callback] = trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [c for c in callbacks if not isinstance(c, ProgressBar)]
        set_results(trainer, results := RoundResults(training=True))
        unmergeable = _watch(trainer)
        for part in module.modules():
            if isinstance(part, Metric):
                part.reset()
        loose = self.alone.workspace.state.attributes.loose_metrics
        updates, streams = _updates(loose), streams_of(trainer.datamodule, visit.client)  # type: ignore[attr-defined]
        self.alone.prepare(visit)
        reply = self.alone.answer(step, state, down, visit)
        left = self.alone.left[visit.client]
        _share_states(module)
        if updates != _updates(loose):
            unmergeable.append("training updates a metric that is no part of the module")
        if any(stream.changed() for stream in streams):
            unmergeable.append("training draws from a random generator of the data")
        if (name := _unsendable(left)) is not None:
            unmergeable.append(name)
        facts = {name: getattr(visit, name) for name in ("step", "optimizer_steps", "planned", "work", "loss")}
        if listening(trainer, "on_client_end"):
            certificate = visit.certificate and Exactness(visit.certificate.residual, visit.certificate.limit)
            facts |= {"question": visit.question, "certificate": certificate}
        if unmergeable:  # the parent takes nothing of it
            left = self.alone.workspace.unchanged
        rest, logged = replace(reply, state=None), Logged.of(results, module)
        return reply.state, _Answer(rest, logged, left, facts, next(iter(unmergeable), None))


def _unpacked(left: Left) -> Left:
    """With tensors of its own: those that came would keep the whole parcel."""
    appended = tree_map_only(Tensor, Tensor.clone, left.changes.appended)
    return replace(left, state=clones(left.state), changes=replace(left.changes, appended=appended))


def _unsendable(left: Left) -> str | None:
    """Why what a visit left behind cannot be sent to another process; None if it can."""
    try:
        pickle.dumps(left.changes.appended)
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:
        return f"training appends entries to a list that cannot be sent to another process ({error})"
    return None


def _watch(trainer: pl.Trainer) -> list[str]:
    """In the child: notes when training reads what was gathered from all clients, or writes to a logger itself."""
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
    """Give every metric of a collection its own state: in groups, only the first of several is updated."""
    for part in module.modules():
        if isinstance(part, MetricCollection):
            part.items(copy_state=True)


def _computed(metric: Metric, compute: Callable[[], Any], name: str, found: list[str]) -> Any:
    if is_read_by_user(metric):
        found.append(f"training reads the value of {name}, gathered from clients before")
    return compute()


class _Logger:
    """Stands for a logger, which is the parent's."""

    def __init__(self, found: list[str]) -> None:
        self._found = found

    def __getattr__(self, name: str) -> Any:
        self._found.append(f"training writes to the logger itself ({name})")
        return self

    def __call__(self, *_: Any, **__: Any) -> None:
        return None


class _Team:
    """Forked processes, the k-th of n with the tasks k, k + n, k + 2n, ...

    Args:
        task: gives the state of a client and the rest of its answer, by its place in the cohort.
        known: the tensors that need not be sent with them.
    """

    def __init__(
        self,
        workers: int,
        tasks: int,
        task: Callable[[int], tuple[Any, _Answer]],
        known: Callable[[int], list[Tensor]],
    ) -> None:
        self.known = known
        self.parcels = [(Parcel(), Parcel()) for _ in range(tasks)]
        self.lines: list[Connection] = []
        self.pids: list[int] = []
        sys.stdout.flush()  # or children would print it once more
        for k in range(workers):
            receiver, sender = Pipe(duplex=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # other threads are not needed
                pid = os.fork()
            if pid == 0:
                self._work(range(k, tasks, workers), task, sender)
            sender.close()
            self.lines.append(receiver)
            self.pids.append(pid)

    def _work(self, share: Sequence[int], task: Callable[[int], tuple[Any, _Answer]], line: Connection) -> None:
        """Everything a child does; it never returns."""
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            for i in share:
                try:
                    state, answer = task(i)
                    first, second = self.parcels[i]
                    labels = [first.fill(state, self.known(i)), second.fill(answer, self._known(i, state))]
                    line.send((None, labels))
                except BaseException as error:  # whatever ends the child is told to the parent, which raises it
                    line.send(((isinstance(error, DivergenceError), type(error).__name__, str(error)), []))
                    break
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)

    def receive(self, i: int, where: str) -> tuple[Any, _Answer]:
        try:
            failure, labels = self.lines[i % len(self.lines)].recv()
        except EOFError:
            raise ClientError(f"{where}: its process died, perhaps for lack of memory. Use fewer workers.") from None
        if failure is not None:
            diverged, kind, text = failure
            known = kind in (ClientError.__name__, DivergenceError.__name__)
            raise (DivergenceError if diverged else ClientError)(text if known else f"{where}: {kind}: {text}")
        first, second = self.parcels[i]
        state = first.open(labels[0], self.known(i))
        return state, second.open(labels[1], self._known(i, state))

    def _known(self, i: int, state: Any) -> list[Tensor]:
        return [*self.known(i), *(leaf for leaf in tree_leaves(state) if isinstance(leaf, Tensor))]

    def dismiss(self) -> None:
        """Kill the processes that still run, and close their pipes."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for line in self.lines:
            line.close()
        for parcels in self.parcels:
            for parcel in parcels:
                parcel.close()
