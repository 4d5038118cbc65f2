"""The messages of a real federation: roll calls, instructions, and their answers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor

from lightning_fed.core.memory import ClientId
from lightning_fed.deploy.frames import Frame, FrameError, Schema, Spec, encode
from lightning_fed.deploy.keys import Key

VERSION = 1
ROLL, TRAIN, REFUSED = "roll", "train", "refused"
#: Numbers of a round, in every instruction to train: size of the cohort, optimiser steps of the run before this round,
#: batches of the longest visit, and the planned sum of step sizes.
NUMBERS = ("cohort", "local_time", "batches", "lr_sum")


@dataclass(frozen=True)
class Asked:
    """One client of an instruction.

    Args:
        client: its id.
        base: the key of the state from which the visit begins; ``NONE`` for that of round 0.
        committed: the key of the state that the server committed last. The node forgets all others but ``base``.
        position: place in the cohort.
    """

    client: ClientId
    base: Key
    committed: Key
    position: int


@dataclass(frozen=True)
class Envelope:
    """What an instruction is: name of the run, its own name, and its kind.

    ``roll`` asks which clients a node has, ``train`` has some of them visited.
    """

    run: str
    key: Key
    kind: str


@dataclass(frozen=True, eq=False)
class Parts:
    """A record on its way: its tensors, and its other fields."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Instruction:
    """What the server sends to a node.

    Args:
        envelope: what it is.
        settings: settings of the experiment, which must be the node's own.
        clients: the clients to visit.
        numbers: the ``NUMBERS`` of the round.
        down: the broadcast.
        x0: the first model, where a client has no state yet.
        buffers: the server's buffers.
    """

    envelope: Envelope
    settings: Mapping[str, Any]
    clients: Sequence[Asked] = ()
    numbers: Mapping[str, float] = field(default_factory=dict)
    down: Parts = field(default_factory=Parts)
    x0: Tensor | None = None
    buffers: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def run(self) -> str:
        """Name of the run."""
        return self.envelope.run

    @property
    def key(self) -> Key:
        """Name of the instruction."""
        return self.envelope.key

    def encode(self) -> bytes:
        """The instruction as a frame."""
        clients = [[asked.client, asked.base, asked.committed, asked.position] for asked in self.clients]
        header = {"version": VERSION, "run": self.run, "key": self.key, "kind": self.envelope.kind}
        header |= {"settings": dict(self.settings), "clients": clients, "numbers": dict(self.numbers)}
        header["plain"] = dict(self.down.plain)
        x0 = {} if self.x0 is None else {"x0": self.x0}
        return encode(header, {**prefixed("down/", self.down.tensors), **x0, **prefixed("buffers/", self.buffers)})

    @classmethod
    def read(cls, frame: Frame, expected: Schema) -> Instruction:
        """The instruction in a frame whose tensors must be as ``expected``; x0 is optional."""
        header = frame.header
        if "x0" not in frame.schema:
            expected = {name: spec for name, spec in expected.items() if name != "x0"}
        tensors = frame.tensors(expected)
        try:
            clients = [
                Asked(client_id(cid), Key.read(base), Key.read(committed), int(position))
                for cid, base, committed, position in header["clients"]
            ]
            return cls(
                Envelope(str(header["run"]), Key.read(header["key"]), str(header["kind"])),
                dict(header["settings"]),
                clients,
                {name: float(header["numbers"][name]) for name in (NUMBERS if header["kind"] == TRAIN else ())},
                Parts(unprefixed("down/", tensors), dict(header["plain"])),
                tensors.get("x0"),
                unprefixed("buffers/", tensors),
            )
        except (KeyError, TypeError, ValueError) as error:
            raise FrameError(f"The instruction cannot be read: {error!r}") from None


@dataclass(frozen=True, eq=False)
class Visited:
    """A client's part of an answer: its message and the numbers that leave the node, or why there is none."""

    client: ClientId
    failure: str | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    plain: Mapping[str, Any] = field(default_factory=dict)
    message: Mapping[str, Tensor] = field(default_factory=dict)
    shared: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True, eq=False)
class Answer:
    """What a node answers: it repeats run and key, and the checksum of the instruction.

    Args:
        kind: that of the instruction, or ``refused``; ``reason`` then says why.
        visited: the clients in the order of the instruction; for a roll call, the node's clients with their numbers.
        metrics: metrics of the node's clients together, by the names that the node shares.
    """

    run: str
    key: Key
    kind: str
    of: str
    visited: Sequence[Visited] = ()
    metrics: Mapping[str, float] = field(default_factory=dict)
    reason: str = ""

    def encode(self) -> bytes:
        """The answer as a frame."""
        header: dict[str, Any] = {"version": VERSION, "run": self.run, "key": self.key, "kind": self.kind}
        header |= {"of": self.of, "metrics": dict(self.metrics), "reason": self.reason}
        header["visited"] = [[own.client, own.failure, dict(own.numbers), dict(own.plain)] for own in self.visited]
        tensors: dict[str, Tensor] = {}
        for i, own in enumerate(self.visited):
            tensors |= {**prefixed(f"{i}/message/", own.message), **prefixed(f"{i}/shared/", own.shared)}
        return encode(header, tensors)

    @classmethod
    def read(cls, frame: Frame, message: Schema, shared: Schema) -> Answer:
        """The answer in a frame: each client has a ``message``, and ``shared`` buffers or a part of them."""
        header = frame.header
        try:
            entries = [
                (client_id(cid), failure, _counts(own), dict(plain)) for cid, failure, own, plain in header["visited"]
            ]
            known = str(header["run"]), Key.read(header["key"]), str(header["kind"]), str(header["of"])
            rest = _numbers(header["metrics"]), str(header["reason"])[:1000]
        except (KeyError, TypeError, ValueError, AttributeError, OverflowError) as error:
            raise FrameError(f"The answer cannot be read: {str(error)[:200]!r}") from None
        expected: dict[str, Spec] = {}
        for i, (_, failure, *_) in enumerate(entries):
            if failure is None and known[2] == TRAIN:
                expected |= {f"{i}/message/{name}": spec for name, spec in message.items()}
                sent = {f"{i}/shared/{name}": spec for name, spec in shared.items()}
                expected |= {name: spec for name, spec in sent.items() if name in frame.schema}
        tensors = frame.tensors(expected)
        visited = [
            Visited(
                cid,
                None if failure is None else str(failure)[:200],
                own,
                plain,
                unprefixed(f"{i}/message/", tensors),
                unprefixed(f"{i}/shared/", tensors),
            )
            for i, (cid, failure, own, plain) in enumerate(entries)
        ]
        return cls(*known, visited, *rest)


def client_id(value: Any) -> ClientId:
    """A client's id from a header: a whole number or text."""
    if type(value) is not int and not isinstance(value, str):
        raise FrameError(f"A client's id is a whole number or text; got {str(value)[:100]}.")
    return value


def _numbers(value: Any) -> dict[str, float]:
    return {str(name): float(number) for name, number in value.items()}


def _counts(value: Any) -> dict[str, float]:
    """Numbers of a visit: a loss, and counts."""
    numbers = _numbers(value)
    for name, number in numbers.items():
        if name != "loss" and not (number.is_integer() and 0 <= number < 2**53):
            raise FrameError(f"{name[:100]} is a count; got {number!r}.")
    return numbers


def prefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def unprefixed(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
