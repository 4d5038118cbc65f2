from __future__ import annotations

import os
import pickle
import signal
import sys
import warnings
from collections.abc import Callable, Generator, Iterator, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from lightning_fed.core.failures import RAISED, Failure
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.round import Step
from lightning_fed.engines.answers import Answer, Recording
from lightning_fed.engines.orphans import ender
from lightning_fed.engines.sequential import ClientError, SequentialEngine
from lightning_fed.lightning import ProgressBar, SIGTERMException, pl
from lightning_fed.trainer.hooks import Visit, listening, notify
from lightning_fed.trainer.merged_log import Logged
from lightning_fed.trainer.parcels import empty_buffers, pack, unpack

#: What a child sends to its parent for one client: the answer, and what the visit logged.
_Answer = tuple[Answer, Logged]


class WorkersEngine:
    """Asks the clients of a cohort in worker processes, each forked from this process at the beginning of the round.

    A child inherits all state, so it computes what this process would compute; only replies come back.

    Args:
        alone: asks one client.
        workers: number of processes.
        give_up: called with a reason when a module turns out to need a single process.
    """

    def __init__(self, alone: SequentialEngine, workers: int, give_up: Callable[[str], None]) -> None:
        self.alone, self.workers, self.give_up = alone, workers, give_up

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]
    ) -> Iterator[Reply[Any, Any] | Failure]:
        known = list(states)
        visits = [Visit(self.alone.round, cid, i, len(cohort)) for i, cid in enumerate(cohort)]
        done = yield from self._ask_workers(step, known, down, visits)
        for state, visit in zip(known[done:], visits[done:], strict=True):
            yield self.alone.visit(step, state, down, visit)

    def _ask_workers(
        self, step: Step, states: list[Any], down: Broadcast, visits: list[Visit]
    ) -> Generator[Reply[Any, Any] | Failure, None, int]:
        """Yields replies in the order of the cohort; returns how many (fewer if workers are abandoned)."""
        names = [self.alone.where(visit.client) for visit in visits]

        def task(i: int) -> _Answer | Failure | str:
            return self.alone.spared(visits[i], lambda: self._answer(step, states[i], down, visits[i]))

        team = _Team(self.workers, names, task)
        try:
            for i, visit in enumerate(visits):
                if team.is_orphaned(i):
                    yield self.alone.visit(step, states[i], down, visit)
                    continue
                notify(self.trainer, "on_client_start", visit)
                answer = self._receive(team, i)
                if isinstance(answer, str):
                    self.give_up(answer)
                    return i
                yield answer if isinstance(answer, Failure) else self._take(visit, *answer)
        finally:
            team.dismiss()
        return len(visits)

    def _receive(self, team: _Team, i: int) -> _Answer | Failure | str:
        """The answer of a task; the death of its process is a failure of its client, where rounds survive those."""
        try:
            return team.receive(i)
        except _DeathError as error:
            if not self.alone.policy.skips:
                raise
            return Failure(RAISED, str(error))
        finally:
            if self.trainer.received_sigterm:
                raise SIGTERMException

    @property
    def trainer(self) -> pl.Trainer:
        return self.alone.loop.trainer

    def _take(self, visit: Visit, answer: Answer, logged: Logged) -> Reply[Any, Any]:
        """Apply the effects of a child's visit to this process, and notify callbacks of its end."""
        logged.put_into(self.trainer)
        answer.take(self.alone, visit)
        return answer.reply

    def _answer(self, step: Step, state: Any, down: Broadcast, visit: Visit) -> _Answer | str:
        """In the child: return one client's reply and the effects of its visit, or why it needs a single process."""
        callbacks: list[pl.Callback] = self.trainer.callbacks  # type: ignore[attr-defined]
        callbacks[:] = [c for c in callbacks if not isinstance(c, ProgressBar)]  # the terminal is the parent's
        recording = Recording(self.alone, [visit])
        self.alone.prepare(visit)
        reply = self.alone.answer(step, state, down, visit)
        return recording.obstacle() or (self._told(visit, reply), recording.logged())

    def _told(self, visit: Visit, reply: Reply[Any, Any]) -> Answer:
        return Answer.of(self.alone, visit, reply, whole=bool(listening(self.trainer, "on_client_end")))


class _DeathError(ClientError):
    """A worker process has died in the middle of a visit."""


_Task = Callable[[int], _Answer | Failure | str]


class _Team:
    """Forked processes; the k-th of n does the tasks k, k + n, k + 2n, ...

    Args:
        names: round and client of each task, for the beginning of messages.
        task: runs the visit of a client, by its position in the cohort.
    """

    def __init__(self, workers: int, names: Sequence[str], task: _Task) -> None:
        self.names = names
        self._dead: set[int] = set()  # processes whose death was told
        self.lines: list[Connection] = []
        self.pids: list[int] = []
        self._arrived: dict[int, _Answer | Failure | str | ClientError] = {}
        sys.stdout.flush()  # children inherit the buffer and would print it again
        end_with_parent = ender()
        for k in range(min(workers, len(names))):
            receiver, sender = Pipe()  # a socket, which takes megabytes in half the time of a one-way pipe
            with warnings.catch_warnings():
                # Python warns of forks with threads; children use none of the parent's threads
                warnings.filterwarnings("ignore", "This process", DeprecationWarning)
                pid = os.fork()
            if pid == 0:
                end_with_parent()
                self._work(range(k, len(names), workers), task, sender)
            sender.close()
            self.lines.append(receiver)
            self.pids.append(pid)

    def _work(self, share: Sequence[int], task: _Task, line: Connection) -> None:
        """Everything a child does; it never returns."""
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)  # torch's thread pool does not survive a fork
            for i in share:
                try:
                    _send(line, i, task(i))
                except ClientError as error:
                    _send(line, i, error)
                    break
                except BaseException as error:  # also exits: the parent raises every error with the client's name
                    _send(line, i, ClientError(f"{self.names[i]}: {type(error).__name__}: {error}"))
                    break
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)

    def is_orphaned(self, i: int) -> bool:
        """Whether the process of a task died in an earlier one."""
        return i not in self._arrived and i % len(self.lines) in self._dead

    def receive(self, i: int) -> _Answer | Failure | str:
        """The answer of a task; others that arrive before it are kept, so that no child waits until its turn."""
        own = self.lines[i % len(self.lines)]
        while i not in self._arrived:
            if own.closed:
                self._dead.add(i % len(self.lines))
                raise _DeathError(f"{self.names[i]}: its process died, perhaps for lack of memory. Use fewer workers.")
            for line in wait([line for line in self.lines if not line.closed]):
                self._take_from(line)
        answer = self._arrived.pop(i)
        if isinstance(answer, ClientError):
            raise answer
        return answer

    def _take_from(self, line: Any) -> None:
        try:
            i, answer = _received(line)
        except (EOFError, OSError):  # the child has ended: with all its tasks done, or died
            line.close()
        else:
            self._arrived[i] = answer

    def dismiss(self) -> None:
        """Kill the processes that still run, and close their lines."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for line in self.lines:
            line.close()


def _send(line: Connection, i: int, content: Any) -> None:
    try:
        parcel = pack((i, content))
    except (pickle.PicklingError, TypeError, AttributeError, RuntimeError) as error:  # all that pickle and torch raise
        return _send(line, i, f"training leaves something that cannot be sent to another process ({error})")
    line.send((parcel.stream, [part.nbytes for part in parcel.buffers]))
    for part in parcel.buffers:
        line.send_bytes(part)


def _received(line: Connection) -> Any:
    stream, sizes = line.recv()
    parts = empty_buffers(sizes)
    for part in parts:
        line.recv_bytes_into(part)
    return unpack(stream, list(parts))
