"""Ask the clients of an exchange over a network, again where nodes do not answer, and apply each answer once."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from lightning_fed.core.memory import ClientId
from lightning_fed.deploy.frames import Frame, FrameError, Schema, digest_of
from lightning_fed.deploy.keys import Key
from lightning_fed.deploy.messages import REFUSED, Answer, Instruction
from lightning_fed.deploy.transport import Transport

_log = logging.getLogger(__name__)

#: Gives the instruction for a node, of some of its clients, under a key.
Write = Callable[[int, Sequence[ClientId], Key], Instruction]
#: Is told the round, and the nodes that are missing in it.
Tell = Callable[[int, Sequence[int]], None]
#: Seconds for which a node may be disconnected before that is told.
ABSENT = 30.0


class RefusedError(RuntimeError):
    """A node refuses to take part; the message is its reason, such as settings that differ."""


@dataclass
class Patience:
    """How long nodes are waited for.

    Args:
        timeout: seconds that one exchange waits for answers before nodes are asked again. It is longer than a visit of
            all the clients that one node has in a cohort.
        total: seconds after which clients that have not answered count as failed.
        pause: seconds between looks at which nodes are connected.

    >>> Patience(timeout=0)
    Traceback (most recent call last):
    ValueError: Patience.timeout must be a positive number of seconds, got 0. Every exchange has a limit.
    """

    timeout: float = 600.0
    total: float = 3600.0
    pause: float = 0.5

    def __post_init__(self) -> None:
        for name in ("timeout", "total", "pause"):
            if not 0 < getattr(self, name) < float("inf"):
                value = getattr(self, name)
                raise ValueError(
                    f"Patience.{name} must be a positive number of seconds, got {value}. Every exchange has a limit."
                )


@dataclass
class Link:
    """The server's side of all exchanges of a run.

    Args:
        transport: carries frames.
        owners: the node of each client, as the server's operator registered it: a node speaks for no other client.
        run: name of the run.
        incarnation: how often the server has been started for it.
        patience: how long nodes are waited for.
        tell: is told, once in an exchange, which nodes are waited for longer than usual.
    """

    transport: Transport
    owners: Mapping[ClientId, int]
    run: str
    incarnation: int
    patience: Patience = field(default_factory=Patience)
    tell: Tell = lambda round, nodes: None

    def ask(
        self, clients: Sequence[ClientId], place: tuple[int, int], write: Write, message: Schema, shared: Schema
    ) -> dict[int, tuple[Key, Answer]]:
        """The answers by node, each with the key of the instruction that it answers.

        Nodes that do not answer in time are asked again under a new key, until patience ends.
        """
        waiting: dict[int, list[ClientId]] = {}
        for cid in clients:
            waiting.setdefault(self.owners[cid], []).append(cid)
        answers: dict[int, tuple[Key, Answer]] = {}
        begun, attempt = time.monotonic(), 0
        told: set[int] = set()
        while waiting and (left := begun + self.patience.total - time.monotonic()) > 0:
            present = self.transport.nodes() & waiting.keys()
            if attempt or time.monotonic() - begun > ABSENT:
                if missing := sorted(waiting.keys() - told):
                    self.tell(place[0], missing)
                told |= waiting.keys()
            if not present:
                time.sleep(min(self.patience.pause, left))
                continue
            key = Key(self.incarnation, *place, attempt)
            attempt += 1
            for node, answer in self._once(present, waiting, key, write, message, shared, left):
                answers[node] = (key, answer)
                del waiting[node]
            if waiting:
                _log.warning("Nodes %s have not answered %s; asking again.", sorted(waiting), key)
                time.sleep(min(self.patience.pause, max(0.0, left)))
        return answers

    def _once(
        self,
        present: set[int],
        waiting: Mapping[int, Sequence[ClientId]],
        key: Key,
        write: Write,
        message: Schema,
        shared: Schema,
        left: float,
    ) -> list[tuple[int, Answer]]:
        frames = {node: write(node, waiting[node], key).encode() for node in sorted(present)}
        found: list[tuple[int, Answer]] = []
        for node, data in self.transport.exchange(frames, min(self.patience.timeout, left)):
            if data is None:
                continue
            try:
                answer = Answer.read(Frame.open(data), message, shared)
                self._check(answer, key, digest_of(frames[node]), waiting[node])
            except FrameError as error:
                _log.warning("An answer of node %s to %s is not applied: %s", node, key, error)
                continue
            if answer.kind == REFUSED:
                raise RefusedError(f"Node {node} refuses: {answer.reason}")
            found.append((node, answer))
        return found

    def _check(self, answer: Answer, key: Key, digest: str, clients: Sequence[ClientId]) -> None:
        """Refuse an answer to anything but this very instruction."""
        if (answer.run, answer.key, answer.of) != (self.run, key, digest):
            raise FrameError(f"it answers instruction {answer.key} of run {answer.run!r}.")
        if answer.kind != REFUSED and clients and [own.client for own in answer.visited] != list(clients):
            raise FrameError("it is about other clients.")
