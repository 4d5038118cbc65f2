"""The changes of a round, ready to be committed, and the memories of clients as they will be then."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from lightning_fed.core.memory import ClientId, Cost, Deferred, Memory, Store, Summary


@dataclass(frozen=True, eq=False)
class Commit:
    """Everything a round changes. Applying it twice is the same as once, so an interrupted commit is just redone."""

    server: Any
    memories: dict[ClientId, Memory]
    buffers: dict[str, Tensor]
    rounds_done: int
    local_time: int
    cost: Cost


class StoreAhead:
    """A store as it will be after a commit, for reading memories one by one.

    >>> from lightning_fed.core.memory import MemoryStore
    >>> store = MemoryStore(fresh=lambda: "x0")
    >>> store.put({"a": Memory("x1", visits=1), "b": Memory("x2", visits=1)})
    >>> ahead = StoreAhead(store, {"a": Memory("x3", visits=2)})
    >>> [ahead[cid].state for cid in "abc"], ahead.summary("a").visits, ahead.get("c")
    (['x3', 'x2', 'x0'], 2, None)
    """

    def __init__(self, store: Store, memories: Mapping[ClientId, Memory]) -> None:
        self._store, self._memories = store, memories

    def __getitem__(self, cid: ClientId) -> Memory:
        return self._store[cid] if (found := self._staged(cid)) is None else found

    def _staged(self, cid: ClientId) -> Memory | None:
        memory = self._memories.get(cid)
        if memory is not None and isinstance(memory.state, Deferred):
            return replace(memory, state=memory.state.loaded())
        return memory

    def get(self, cid: ClientId) -> Memory | None:
        """The memory of a client, if it has taken part."""
        return self._staged(cid) or self._store.get(cid)

    def summary(self, cid: ClientId) -> Summary | None:
        """Visits and cost of a client, if it has taken part."""
        return self._memories[cid].summary if cid in self._memories else self._store.summary(cid)
