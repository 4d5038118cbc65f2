"""Run algorithms without Lightning, on clients in closed form, in float64."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.algorithm import Algorithm
from lightning_fed.core.local_work import LocalWork
from lightning_fed.core.memory import ClientId, Memory, MemoryStore
from lightning_fed.core.messages import Broadcast, Reply
from lightning_fed.core.problem import Solution
from lightning_fed.core.round import Step, run_round
from lightning_fed.core.validation import is_whole
from lightning_fed.laboratory.history import History
from lightning_fed.laboratory.protocols import Loss, Solver
from lightning_fed.laboratory.quadratic import Oracle
from lightning_fed.laboratory.solvers import planned_lr_sum, solvers_for
from lightning_fed.sampling import Full, Sampler


class _Engine:
    def __init__(self, oracles: Sequence[Oracle], seed: int) -> None:
        self.oracles, self.seed, self.round = oracles, seed, -1
        self.answers: dict[int, Solution] = {}

    def ask(
        self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[int | str]
    ) -> Iterator[Reply[Any, Any]]:
        for i, state in zip(map(int, cohort), states, strict=True):
            oracle = replace(self.oracles[i], key=(self.seed, self.round, i), round=self.round, answers=[])
            reply = step(state, down, oracle)
            if oracle.answers:
                self.answers[i] = oracle.answers[-1]
            yield reply


def simulate(
    algorithm: Algorithm[Any, Any, Any],
    clients: Sequence[Loss],
    x0: Tensor | Sequence[float] | None = None,
    rounds: int | None = None,
    cohorts: Iterable[Iterable[int]] | None = None,
    solver: Solver | Sequence[Solver] | None = None,
    sampler: Sampler | None = None,
    seed: int = 0,
    events: Iterable[tuple[int, int]] | None = None,
    resume: History | None = None,
) -> History:
    """Run ``algorithm`` on clients in closed form and keep every state.

    Args:
        algorithm: any :class:`~lightning_fed.algorithms.Algorithm`.
        clients: losses, such as :class:`Quadratic`; client ``i`` is ``clients[i]``.
        x0: first model; zeros by default, in the precision of the first client.
        rounds: number of (further) rounds, with cohorts drawn by ``sampler`` (all clients by default) from ``seed``.
        cohorts: the clients of each round, instead of ``rounds``.
        solver: :class:`Exact` (default) or :class:`GradientDescent`, for a number of steps or until a tolerance
            holds; or a list with one solver per client.
        events: asynchronous uploads ``(client, delay)``, in the order in which the server applies them; the client has
            started from the model of ``delay`` uploads before, and has done no other work since.
        resume: history of a run to continue, of the same algorithm, clients and seed; the result contains both.

    >>> from lightning_fed import Quadratic
    >>> from lightning_fed.algorithms import FedADMM
    >>> clients = [Quadratic.scalar(1.0, 1.0), Quadratic.scalar(1.0, 3.0)]
    >>> history = simulate(FedADMM(eta=1.0), clients, cohorts=[{0}, {1}, {0, 1}])
    >>> [round(float(s.x_bar), 3) for s in history.server]
    [0.0, 0.5, 2.0, 2.0]
    """
    _check_what_is_given(clients, rounds, cohorts, events, sampler)
    n = len(clients)
    past = History() if resume is None else resume
    solvers = solvers_for(algorithm, solver, n)
    work = LocalWork(seed, lr_sum=planned_lr_sum(solvers, [algorithm.weight(f.num_examples) for f in clients]))
    algorithm = algorithm.planned(work.lr_sum)
    start = _start(x0, clients[0]) if resume is None else _last_model(resume, x0, algorithm, n)
    delays: list[int] = []
    if events is not None:
        _check_single_exchange(algorithm)
        members, delays = _events(events, past.cohorts)
        cohorts = [[i] for i in members]
    schedule = _schedule(n, rounds, cohorts, sampler or Full(), seed, first=len(past))
    if algorithm.traits.everybody:
        _check_everybody(algorithm, schedule, n)
    run = _Run(algorithm, clients, solvers, start, work, past)
    run.begin(resume)
    for k, cohort in enumerate(schedule, start=len(past)):
        run.play(k, cohort, delays[k - len(past)] if delays else None)
    _warn_of_unreached(run.history)
    return run.history


class _Run:
    """A running simulation: server, clients, and the history so far."""

    def __init__(
        self,
        algorithm: Algorithm[Any, Any, Any],
        clients: Sequence[Loss],
        solvers: Sequence[Solver],
        start: Tensor,
        work: LocalWork,
        past: History,
    ) -> None:
        self.algorithm, self.n = algorithm, len(clients)
        self.engine = _Engine([Oracle(f, s) for f, s in zip(clients, solvers, strict=True)], work.seed)
        self.weights: dict[ClientId, float] = {i: algorithm.weight(f.num_examples) for i, f in enumerate(clients)}
        self.work = work
        self.store = MemoryStore(fresh=lambda: algorithm.init_client(start))
        self.server = past.server[-1] if past.server else algorithm.init_server(start)
        self.history = History([*past.server], [*past.clients], [*past.cohorts], [*past.answers])

    def begin(self, resume: History | None) -> None:
        """Take the states of a run to continue, or visit all clients once if the algorithm starts so."""
        if resume is not None:
            self.store.put({i: Memory(state) for i, state in enumerate(resume.clients[-1])})
            return
        if self.algorithm.traits.full_start:
            self._advance(range(self.n), exchanges=1)
        self._remember()

    def play(self, k: int, cohort: list[int], delay: int | None) -> None:
        """Round ``k``; with a ``delay``, clients start from the model of ``delay`` rounds before."""
        self.engine.round, self.engine.answers = k, {}
        self._advance(cohort, stale=None if delay is None else self.history.server[k - delay])
        self.history.cohorts.append(cohort)
        self.history.answers.append(self.engine.answers)
        self._remember()

    def _advance(self, cohort: Sequence[int], stale: Any = None, exchanges: int | None = None) -> None:
        """Run a round; clients work with what the ``stale`` server sent, if there is one."""

        def broadcast(server: Any) -> Broadcast:
            return self.algorithm.broadcast(server if stale is None else stale, self.work)

        args = (cohort, self.engine, lambda i: self.store[i].state, self.weights, broadcast, exchanges)
        outcome = run_round(self.algorithm, self.server, *args)
        self.store.put({i: Memory(state, self.store[i].visits + 1) for i, state in outcome.states.items()})
        self.server = outcome.server

    def _remember(self) -> None:
        self.history.server.append(self.server)
        self.history.clients.append([self.store[i].state for i in range(self.n)])


def _check_what_is_given(
    clients: Sequence[Loss], rounds: object, cohorts: object, events: object, sampler: Sampler | None
) -> None:
    if not clients:
        raise ValueError("simulate needs at least one client.")
    if sum(given is not None for given in (rounds, cohorts, events)) != 1:
        raise ValueError("simulate needs one of rounds=, cohorts= and events=.")
    if rounds is None and sampler is not None:
        given = "events" if cohorts is None else "cohorts"
        raise ValueError(
            f"simulate got {given}= and sampler=. The sampler draws cohorts for rounds=; give one of them."
        )


def _check_single_exchange(algorithm: Algorithm[Any, Any, Any]) -> None:
    if algorithm.traits.exchanges > 1:
        name, times = type(algorithm).__name__, algorithm.traits.exchanges
        raise ValueError(
            f"{name} visits clients {times} times in a round, but an event is a single upload. Use rounds=."
        )


def _warn_of_unreached(history: History) -> None:
    answers = [answer for by_client in history.answers for answer in by_client.values()]
    short = [answer for answer in answers if not answer.reached]
    if short:
        warnings.warn(
            f"{len(short)} of {len(answers)} local solutions did not reach their tolerance: after"
            f" {max(a.steps for a in short)} steps the local gradient was up to {max(a.residual for a in short):.3g}."
            " Allow more steps or a looser tolerance; History.answers has them all.",
            stacklevel=3,
        )


def _events(events: Iterable[tuple[int, int]], past: Sequence[Sequence[int]]) -> tuple[list[int], list[int]]:
    """Clients and delays; upload k read the model after ``k - delay`` uploads, its client's last one included."""
    members, delays = [], []
    uploaded = {i: k for k, cohort in enumerate(past) for i in cohort}
    for e, (client, delay) in enumerate(events):
        k = e + len(past)
        if not is_whole(delay) or not 0 <= delay <= k:
            raise ValueError(f"events[{e}] has delay {delay!r}; before it there were {k} uploads, so 0 to {k}.")
        if (last := uploaded.get(client, -1)) >= k - delay:
            raise ValueError(
                f"events[{e}] of client {client!r} has delay {delay}, so it began before the client's last upload"
                f" ({k - last} before it): a client has one job at a time. Its delay can be 0 to {k - last - 1}."
            )
        uploaded[client] = k
        members.append(client)
        delays.append(delay)
    return members, delays


def _last_model(
    resume: History, x0: Tensor | Sequence[float] | None, algorithm: Algorithm[Any, Any, Any], n: int
) -> Tensor:
    """Where a run continues; refuse a history of another federation."""
    if x0 is not None:
        raise ValueError("simulate got x0= and resume=. A resumed run continues from its last model; omit x0.")
    if not resume.server or len(resume.clients[-1]) != n:
        known = len(resume.clients[-1]) if resume.server else 0
        raise ValueError(f"simulate got {n} clients, but resume= is a run of {known}. Give the same clients.")
    x = resume.x_bar
    mine = (algorithm.init_server(x), algorithm.init_client(x))
    for blank, found in zip(mine, (resume.server[-1], resume.clients[-1][0]), strict=True):
        if type(blank) is not type(found):
            raise ValueError(
                f"{type(algorithm).__name__} cannot resume from a history that holds {type(found).__module__} states."
                " Resume with the algorithm that made it."
            )
    return x


def _check_everybody(algorithm: Algorithm[Any, Any, Any], schedule: Sequence[Sequence[int]], n: int) -> None:
    for k, cohort in enumerate(schedule):
        if len(cohort) not in (0, n):
            raise ValueError(
                f"{type(algorithm).__name__} needs every client in every round; round {k} has {len(cohort)} of {n}."
                " Use FedADMM or FedDR for partial participation."
            )


def _start(x0: Tensor | Sequence[float] | None, client: Loss) -> Tensor:
    b = getattr(client, "b", None)
    if x0 is None:
        if not isinstance(b, Tensor):
            raise ValueError(f"simulate needs x0= for clients of type {type(client).__name__}.")
        return torch.zeros_like(b)
    if not isinstance(x0, Tensor) or not x0.is_floating_point():
        x0 = torch.as_tensor(x0, dtype=b.dtype if isinstance(b, Tensor) else torch.float64)
    if isinstance(b, Tensor) and x0.shape != b.shape:
        raise ValueError(f"x0 has shape {tuple(x0.shape)}, the clients' b {tuple(b.shape)}. Give x0 that shape.")
    return x0


def _schedule(
    n: int, rounds: int | None, cohorts: Iterable[Iterable[int]] | None, sampler: Sampler, seed: int, first: int
) -> list[list[int]]:
    if cohorts is None:
        if not is_whole(rounds) or rounds < 0:
            raise ValueError(f"rounds must be a whole number >= 0, got {rounds!r}.")
        sampler.check(n)
        return [sampler.cohort(n, seed, k) for k in range(first, first + rounds)]
    schedule = []
    for k, cohort in enumerate(cohorts):
        if not isinstance(cohort, Iterable):
            raise TypeError(f"cohorts[{k}] is {cohort!r}; a cohort is a set or list of clients, such as {{0, 2}}.")
        members = set(cohort)
        if unknown := [i for i in members if i not in range(n)]:
            raise ValueError(f"cohorts[{k}] names client {unknown[0]!r}; clients are 0 to {n - 1}.")
        schedule.append(sorted(members))
    return schedule
