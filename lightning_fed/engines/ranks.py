"""Ask a share of the cohort in each of several processes, and sum what they say in the order of one."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lightning_fed.core.algorithm import num_bytes
from lightning_fed.core.failures import Failure
from lightning_fed.core.memory import ClientId, Deferred, Store
from lightning_fed.core.messages import Broadcast, Replies, Reply, Summed
from lightning_fed.core.records import leaves_of, tree_map
from lightning_fed.core.round import States, Step
from lightning_fed.core.summation import TreeSum
from lightning_fed.engines.answers import Answer, Recording
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.engines.vectorized import VectorizedEngine
from lightning_fed.lightning import ProgressBar, pl, results_of, set_results
from lightning_fed.store import DiskStore
from lightning_fed.trainer.hooks import Visit, is_server, notify, reading
from lightning_fed.trainer.log_snapshot import LogSnapshot
from lightning_fed.trainer.merged_log import Logged
from lightning_fed.trainer.ranks import Ranks

#: Blocks of the summation tree per process, at least, where the cohort is large enough: shares come out about equal.
BLOCKS = 4


@dataclass(frozen=True)
class Block:
    """Positions of the cohort that one rank visits; a whole node of the tree that sums messages."""

    positions: range
    rank: int


def plan(loads: Sequence[float], ranks: int, size: int | None = None) -> list[Block]:
    """Deal blocks of the cohort, the longest first, to the rank with the least to do; equal in every process.

    Blocks have 2**k positions, so that each is a node of the tree over the whole cohort: ``size``, or as many as leave
    each rank a few blocks.

    >>> [(list(block.positions), block.rank) for block in plan([1, 1, 5, 1, 1], ranks=2)]
    [([0], 1), ([1], 1), ([2], 0), ([3], 1), ([4], 1)]
    """
    size = size or 1 << max(0, int(math.log2(max(1, len(loads) / (BLOCKS * ranks)))))
    cuts = [range(first, min(first + size, len(loads))) for first in range(0, len(loads), size)]
    work = [sum(loads[i] for i in cut) for cut in cuts]
    busy, owner = [0.0] * ranks, {}
    for k in sorted(range(len(cuts)), key=lambda k: (-work[k], k)):
        owner[k] = min(range(ranks), key=lambda rank: (busy[rank], rank))
        busy[owner[k]] += work[k]
    return [Block(cut, owner[k]) for k, cut in enumerate(cuts)]


@dataclass(frozen=True, eq=False)
class _Told:
    """What a rank tells the others of some clients that it visited together: one, or those of a stack."""

    answers: list[Answer | Failure]
    logged: Logged
    like: Any  # a message without its content, if messages do not travel


class RanksEngine:
    """Asks this process's share of a cohort, and gets from the other processes what they heard.

    Every process ends with the same replies and the same sum. Messages stay where they were made: each process sums
    whole nodes of the tree, and pairs of nodes are added up the tree, in its order, by the process that has the left
    one. States and everything that visits logged and left travel to all processes.

    Where the policy leaves clients out that fail, messages travel too: a client that failed takes no place in the
    tree, so that its nodes are known only when everybody has answered.

    Args:
        alone: asks one client.
        inner: asks the clients of a stack together; None to ask clients one by one.
        ranks: the processes.
        loads: what a visit of each client takes, in any unit.
        weights: of all clients.
        store: keeps the states of clients.
    """

    def __init__(
        self,
        alone: SequentialEngine,
        inner: VectorizedEngine | None,
        ranks: Ranks,
        loads: Mapping[ClientId, float],
        weights: Mapping[ClientId, float],
        store: Store,
    ) -> None:
        self.alone, self.inner, self.ranks = alone, inner, ranks
        self.loads, self.weights, self.store = loads, weights, store
        self.stage: Any = lambda cid, reply: None
        self._sums: dict[int, Any] = {}  # of this process's blocks, by number
        self._own: dict[ClientId, Reply[Any, Any]] = {}  # of this process's clients
        self._whole = bool(reading(self.trainer, "on_client_end"))

    @property
    def trainer(self) -> pl.Trainer:
        return self.alone.loop.trainer

    def share(self, cohort: Sequence[ClientId]) -> list[ClientId]:
        """The clients that this process visits, in the order of the cohort."""
        mine = [block for block in self._plan(cohort) if block.rank == self.ranks.rank]
        return [cohort[i] for block in mine for i in block.positions]

    def _plan(self, cohort: Sequence[ClientId]) -> list[Block]:
        """Who visits whom. Stacks stay whole: bits of a reply may depend on how many clients share its stack."""
        size = None if self.inner is None else self.inner.size
        return plan([self.loads[cid] for cid in cohort], self.ranks.size, size)

    def ask(self, step: Step, states: Iterator[Any], down: Broadcast, cohort: Sequence[ClientId]) -> Iterator[Any]:
        assert isinstance(states, States)
        blocks = self._plan(cohort)
        visits = [Visit(self.alone.round, cid, i, len(cohort)) for i, cid in enumerate(cohort)]
        told = self.ranks.together(lambda: self._visit_share(step, states, down, blocks, visits))
        by_block = {k: parts for each in told for k, parts in each.items()}
        answers = self._take([by_block[k] for k in range(len(blocks))], visits)
        # not kept until this engine is collected: it is part of a cycle, and its tensors may take gigabytes
        sums, self._sums, own, self._own = self._sums, {}, self._own, {}
        if self.alone.policy.skips:
            for answer in answers:
                yield answer if isinstance(answer, Failure) else self._known(answer, own)
            return
        like = next(part.like for parts in by_block.values() for part in parts)
        total = summed(self.ranks, [block.rank for block in blocks], sums, like)
        total = tree_map(lambda leaf: leaf.to(self.trainer.strategy.root_device), total)
        yield Summed(total, [self._known(answer, own) for answer in answers if isinstance(answer, Answer)])

    def _known(self, answer: Answer, made: Mapping[ClientId, Reply[Any, Any]]) -> Reply[Any, Any]:
        """A reply with state and model, where this process has made them; states on disk are read when needed."""
        reply, own = answer.reply, made.get(answer.client)
        if own is not None:
            return replace(reply, state=own.state, x_i=own.x_i)
        if isinstance(reply.state, Deferred) and isinstance(self.store, DiskStore):
            row = reply.state.row
            return replace(reply, state=Deferred(row, partial(self.store.load, row)))
        return reply

    # -- this process's share -----------------------------------------------------------------------------------

    def _visit_share(
        self, step: Step, states: States, down: Broadcast, blocks: Sequence[Block], visits: Sequence[Visit]
    ) -> dict[int, list[_Told]]:
        """Visit the clients of this process; by number of block, what the others are to be told."""
        told: dict[int, list[_Told]] = {}
        with self._apart():
            for k, block in enumerate(blocks):
                if block.rank == self.ranks.rank:
                    total, here = TreeSum(), [visits[i] for i in block.positions]
                    together = [here] if self.inner is not None else [[visit] for visit in here]
                    told[k] = [self._visit(step, states, down, some, total) for some in together]
                    self._sums[k] = None if self.alone.policy.skips else total.value()
        return {k: [self._without_files(part) for part in parts] for k, parts in told.items()}

    def _without_files(self, part: _Told) -> _Told:
        """The same, with rows in place of states that this process has written to the disk that all share."""
        return replace(part, answers=[self._deferred(answer) for answer in part.answers])

    def _deferred(self, answer: Answer | Failure) -> Answer | Failure:
        if isinstance(answer, Failure) or not isinstance(self.store, DiskStore) or not answer.reply.arrived:
            return answer
        row = self.store.written(answer.client)
        return answer if row is None else replace(answer, reply=replace(answer.reply, state=Deferred(row)))

    def _visit(self, step: Step, states: States, down: Broadcast, visits: list[Visit], total: TreeSum) -> _Told:
        recording = Recording(self.alone, visits)
        parts: list[Any]
        if self.inner is None:
            parts = [self.alone.visit(step, _state(states, visits[0]), down, visits[0])]
        else:
            parts = list(self.inner.ask_visits(step, (_state(states, visit) for visit in visits), down, visits))
        if reason := recording.obstacle():
            raise ValueError(f"A fit in {self.ranks.size} processes is impossible here: {reason}. Use devices=1.")
        replies = [each for part in parts for each in (part.apart() if isinstance(part, Replies) else [part])]
        if not self.alone.policy.skips:
            weights = iter(
                [self.weights[v.client] if r.arrived else None for v, r in zip(visits, replies, strict=True)]
            )
            for part in parts:
                stacked = part if isinstance(part, Replies) else Replies.of(part)
                total.add(stacked.message, [next(weights) for _ in stacked.states])
        answers = [self._told_of(visit, reply) for visit, reply in zip(visits, replies, strict=True)]
        return _Told(answers, recording.logged(), None if self.alone.policy.skips else _like(replies[0].message))

    def _told_of(self, visit: Visit, reply: Reply[Any, Any] | Failure) -> Answer | Failure:
        """What travels of one reply: no message where it is summed here, no model unless a callback may read it."""
        if isinstance(reply, Failure):
            return reply
        if self.inner is None:  # states of a stack are small
            self.stage(visit.client, reply)
        self._own[visit.client] = replace(reply, message=None)
        if not self.alone.policy.skips:
            sent = num_bytes(reply.message) if reply.bytes_up is None else reply.bytes_up
            light: Any = {"message": None, "x_i": reply.x_i if self._whole else None, "bytes_up": sent}
            reply = replace(reply, **light)
        return Answer.of(self.alone, visit, reply, self._whole)

    @contextmanager
    def _apart(self) -> Iterator[None]:
        """Keep what this process's visits log and change apart: it is merged with the others', in the cohort's order.

        Callbacks hear of all visits then; progress bars hear of this process's at once.
        """
        trainer, callbacks = self.trainer, list(self.trainer.callbacks)  # type: ignore[attr-defined]
        loggers, joined, results = trainer.loggers, len(self.alone.joined), results_of(trainer)
        log = LogSnapshot(trainer, self.alone.workspace.state.attributes.loose_metrics)
        heard = [callback for callback in callbacks if is_server(callback) or isinstance(callback, ProgressBar)]
        trainer.callbacks[:] = heard  # type: ignore[attr-defined]
        try:
            yield
        finally:
            trainer.callbacks[:] = callbacks  # type: ignore[attr-defined]
            trainer.loggers = loggers
            set_results(trainer, results)
            log.restore()
            del self.alone.joined[joined:]

    # -- everybody's answers ------------------------------------------------------------------------------------

    def _take(self, told: Sequence[Sequence[_Told]], visits: Sequence[Visit]) -> list[Answer | Failure]:
        """Apply the effects of all visits, in the order of the cohort, in every process alike."""
        answers: list[Answer | Failure] = []
        for part in (part for parts in told for part in parts):
            part.logged.put_into(self.trainer)
            for answer in part.answers:
                visit = visits[len(answers)]
                notify(self.trainer, "on_client_start", visit)
                if isinstance(answer, Answer):
                    answer.take(self.alone, visit)
                answers.append(answer)
        left, ids = self.alone.left, [visit.client for visit in visits]
        ordered = {cid: left[cid] for cid in dict.fromkeys([*ids, *left]) if cid in left}
        left.clear()
        left.update(ordered)
        return answers


def _like(message: Any) -> Any:
    """A message without its content, of which the shapes remain: its tensors get a first dimension of 0."""
    return tree_map(lambda leaf: leaf.new_empty((0, *leaf.shape)), message)


def _state(states: States, visit: Visit) -> Any:
    """A client's state; one that another process has written in an earlier exchange of the round is read."""
    found = states.of(visit.client)
    return found.loaded() if isinstance(found, Deferred) else found


def summed(ranks: Ranks, owners: Sequence[int], sums: Mapping[int, Any], like: Any) -> Any:
    """The sum over all blocks, pair by pair up the tree; a node without a partner moves up unchanged.

    Args:
        owners: the rank of each block.
        sums: of this process's blocks, by number; they are added to in place.
        like: a message without its content.
    """
    wide = tree_map(lambda leaf: torch.empty(leaf.shape[1:], dtype=torch.float64), like)
    leaves = leaves_of(wide)
    flat = torch.empty(sum(leaf.numel() for leaf in leaves), dtype=torch.float64)
    nodes = [_flattened(sums[k]) if k in sums else None for k in range(len(owners))]
    while len(nodes) > 1:
        for left in range(0, len(nodes) - 1, 2):
            nodes[left] = _added(ranks, owners[left : left + 2], nodes[left : left + 2], flat)
        nodes, owners = nodes[::2], owners[::2]
    total = ranks.spread(flat if nodes[0] is None else nodes[0], owners[0])
    parts = iter(torch.split(total, [leaf.numel() for leaf in leaves]))
    return tree_map(lambda leaf: next(parts).view(leaf.shape), wide)


def _flattened(message: Any) -> Tensor:
    flat = [leaf.reshape(-1).cpu() for leaf in leaves_of(message)]
    return flat[0] if len(flat) == 1 else torch.cat(flat)


def _added(ranks: Ranks, owners: Sequence[int], nodes: Sequence[Tensor | None], like: Tensor) -> Tensor | None:
    """The sum of two nodes, where the left one is; None elsewhere."""
    (left, right), (mine, theirs) = owners, nodes
    if ranks.rank == right != left:
        assert theirs is not None
        ranks.send(theirs, left)
    if ranks.rank != left:
        return None
    other = theirs if left == right else ranks.receive(like, right)
    assert mine is not None
    assert other is not None
    return mine.add_(other)
