"""The memories of clients between rounds: state, visits, buffers, cost."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import astuple, dataclass, field, is_dataclass
from typing import Any, NamedTuple, Protocol

import torch
from torch import Tensor

ClientId = int | str


@dataclass(frozen=True)
class Cost:
    """Cost of a client so far: bytes received and sent, local steps, and gradients over all its data.

    >>> Cost(bytes_down=8, steps=3) + Cost(bytes_down=8, bytes_up=4)
    Cost(bytes_down=16, bytes_up=4, steps=3, gradients=0)
    """

    bytes_down: int = 0
    bytes_up: int = 0
    steps: int = 0
    gradients: int = 0

    def __add__(self, other: Cost) -> Cost:
        down, up = self.bytes_down + other.bytes_down, self.bytes_up + other.bytes_up
        return Cost(down, up, self.steps + other.steps, self.gradients + other.gradients)

    @classmethod
    def sum(cls, costs: Iterable[Cost]) -> Cost:
        spent = [(c.bytes_down, c.bytes_up, c.steps, c.gradients) for c in costs]
        return cls(*(sum(column) for column in zip(*spent, strict=True)))


@dataclass(frozen=True, eq=False)
class Memory:
    """One client's memory: the algorithm's state, how often it took part, buffers it keeps to itself, its cost.

    ``buffers`` also holds parameters that the client keeps to itself: personal ones, and frozen ones that changed.
    ``layout`` numbers the layout that the state's vectors have: which parameters were trained at the client's visit.
    """

    state: Any
    visits: int = 0
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    cost: Cost = Cost()
    layout: int = 0

    @property
    def summary(self) -> Summary:
        """What is known of the client without its vectors."""
        return Summary(self.visits, self.cost, layout=self.layout)


@dataclass(frozen=True, eq=False)
class Deferred:
    """A state that another process has written to disk, ahead of its commit.

    >>> Deferred(row=None, load=lambda: "x1").loaded()
    'x1'
    """

    row: Any
    load: Callable[[], Any] | None = None

    def loaded(self) -> Any:
        assert self.load is not None
        return self.load()


class Summary(NamedTuple):
    """What is known of a client without its vectors; ``bytes`` and ``round`` of its record, where it is on disk.

    >>> Summary(visits=2, cost=Cost(steps=3), bytes=8, round=5, layout=0).cost.steps
    3
    """

    visits: int
    cost: Cost
    bytes: int = 0
    round: int = 0
    layout: int = 0


class Store(Protocol):
    """What keeps clients' memories: :class:`MemoryStore`, or on disk ``lightning_fed.store.DiskStore``."""

    def __getitem__(self, cid: ClientId) -> Memory: ...

    def get(self, cid: ClientId) -> Memory | None: ...

    def summary(self, cid: ClientId) -> Summary | None: ...

    def __iter__(self) -> Iterator[ClientId]: ...

    def __len__(self) -> int: ...

    def put(self, memories: Mapping[ClientId, Memory]) -> None: ...

    def commit(self, round: int, memories: Mapping[ClientId, Memory]) -> None: ...

    def prefetch(self, cids: Iterable[ClientId]) -> None: ...

    def stage(self, cid: ClientId, memory: Memory, round: int) -> None: ...

    def quiesce(self) -> None: ...

    def state_dict(self) -> Any: ...

    def close(self) -> None: ...


#: Converts a memory to the current layout.
Adapt = Callable[[Memory], Memory]
#: Builds a state from its tensors and the number of their layout.
Build = Callable[[Mapping[str, Tensor], int], Any]


class MemoryStore:
    """Client memories, in RAM.

    A client that never took part has no entry; it gets ``fresh()``, the state of round 0, whenever it is asked for.
    Entries are immutable and replaced whole, so putting the same memories twice changes nothing.

    Args:
        fresh: gives the state of round 0.
        adapt: converts a memory of an older layout to the current layout, when it is read.
        build: builds a state from its tensors and the number of their layout; by default a state like ``fresh()``.

    >>> store = MemoryStore(fresh=lambda: "x0")
    >>> store["a"].state, store["a"].visits, len(store)
    ('x0', 0, 0)
    >>> store.put({"a": Memory("x1", visits=1)})
    >>> store["a"].state, list(store)
    ('x1', ['a'])
    """

    def __init__(self, fresh: Callable[[], Any], adapt: Adapt | None = None, build: Build | None = None) -> None:
        self.fresh = fresh
        self._adapt = adapt or (lambda memory: memory)
        self._build = build or (lambda tensors, layout: with_tensors(self.fresh(), tensors))
        self._memories: dict[ClientId, Memory] = {}

    def __getitem__(self, cid: ClientId) -> Memory:
        found = self.get(cid)
        return Memory(self.fresh()) if found is None else found

    def get(self, cid: ClientId) -> Memory | None:
        """The memory of a client, if it has taken part."""
        found = self._memories.get(cid)
        return None if found is None else self._adapt(found)

    def summary(self, cid: ClientId) -> Summary | None:
        """Visits and cost of a client, if it has taken part."""
        found = self._memories.get(cid)
        return None if found is None else found.summary

    def __iter__(self) -> Iterator[ClientId]:
        return iter(self._memories)

    def __len__(self) -> int:
        return len(self._memories)

    def put(self, memories: Mapping[ClientId, Memory]) -> None:
        """Replace the memories of these clients."""
        self._memories.update(memories)

    def commit(self, round: int, memories: Mapping[ClientId, Memory]) -> None:
        """Replace the memories of the clients that took part in a round."""
        self.put(memories)

    def prefetch(self, cids: Iterable[ClientId]) -> None:
        """Read these memories ahead: nothing to do in RAM."""

    def stage(self, cid: ClientId, memory: Memory, round: int) -> None:
        """Write a memory ahead of its commit: nothing to do in RAM."""

    def quiesce(self) -> None:
        """Finish what is written in the background: nothing to do in RAM."""

    def close(self) -> None:
        """Release what the store holds: nothing to do in RAM."""

    def state_dict(self) -> dict[ClientId, dict[str, Any]]:
        """Plain tensors and numbers, on the CPU."""
        return {cid: _entry(memory) for cid, memory in self._memories.items()}

    def load_state_dict(self, saved: Mapping[ClientId, Mapping[str, Any]]) -> None:
        self._memories = {
            cid: Memory(
                self._build(entry["state"], entry["layout"]),
                entry["visits"],
                entry["buffers"],
                Cost(*entry["cost"]),
                entry["layout"],
            )
            for cid, entry in saved.items()
        }


def _entry(memory: Memory) -> dict[str, Any]:
    buffers = {name: buffer.cpu() for name, buffer in memory.buffers.items()}
    cost = list(astuple(memory.cost))
    known = {"state": tensors_of(memory.state), "visits": memory.visits, "buffers": buffers, "cost": cost}
    return {**known, "layout": memory.layout}


def tensors_of(state: Any) -> dict[str, Tensor]:
    """The tensors of a record by field name, on the CPU; those of a record inside it as ``inner.x_i``."""
    return {name: value.detach().cpu() for name, value in _leaves(state).items()}


def _leaves(state: Any, prefix: str = "") -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, value in vars(state).items():
        if isinstance(value, Tensor):
            found[prefix + name] = value
        elif is_dataclass(value):
            found |= _leaves(value, f"{prefix}{name}.")
    return found


def with_tensors(blank: Any, tensors: Mapping[str, Tensor]) -> Any:
    """A record like ``blank`` that holds ``tensors``, on the device and in the precision of ``blank``."""
    own = _leaves(blank)
    if own.keys() != tensors.keys():
        raise ValueError(f"{type(blank).__name__} holds {sorted(own)}, but the saved state has {sorted(tensors)}.")
    for name, value in own.items():
        if value.shape != tensors[name].shape:
            raise ValueError(
                f"{type(blank).__name__}.{name} has {tuple(value.shape)} entries, saved: {tuple(tensors[name].shape)}."
            )
    return _filled(blank, {name: torch.as_tensor(t).to(own[name]) for name, t in tensors.items()})


def _filled(blank: Any, tensors: Mapping[str, Tensor], prefix: str = "") -> Any:
    return type(blank)(
        **{
            name: _filled(value, tensors, f"{prefix}{name}.") if is_dataclass(value) else tensors[prefix + name]
            for name, value in vars(blank).items()
        }
    )
