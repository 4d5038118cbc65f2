"""What a node remembers of its clients: every state under the key of the instruction that made it."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from lightning_fed.core.memory import ClientId, Memory
from lightning_fed.deploy.keys import NONE, Key
from lightning_fed.store import DiskStore, durable
from lightning_fed.store.identity import name_of


class StaleError(ValueError):
    """An instruction is older than one that was followed already, or comes again: it is not followed."""


class LostStateError(ValueError):
    """The server names a state of a client that this node does not have."""


class Versions:
    """States of a node's clients in a folder, one store per run.

    The server alone decides which states count. A new state is written under the key of its instruction, beside the
    one from which it was made. The next instruction names the state that was committed, and all others go: a reply
    that was lost is rolled back, one that arrived while the node was killed is rolled forward.

    Args:
        folder: the node's own folder, for this run.
        fresh: gives the state of round 0, which is also the blank of all states.

    >>> import torch
    >>> from tempfile import mkdtemp
    >>> from lightning_fed.algorithms import FedADMM
    >>> fresh = lambda: FedADMM().init_client(torch.zeros(1))
    >>> with Versions(Path(mkdtemp()), fresh) as versions:
    ...     first, second = Key(1, 0, 0, 0), Key(1, 1, 0, 0)
    ...     versions.keep(first, {"ann": Memory(fresh(), visits=1)})
    ...     versions.keep(second, {"ann": Memory(fresh(), visits=2)})
    ...     [str(key) for key in versions.of("ann")], versions.get("ann", second).visits
    ...     versions.settle({"ann": first})  # the server did not commit the second
    ...     [str(key) for key in versions.of("ann")]
    (['1.0.0.0', '1.1.0.0'], 2)
    ['1.0.0.0']
    """

    def __init__(self, folder: Path, fresh: Callable[[], Any]) -> None:
        self._fresh = fresh
        self._guard = durable.make_folder(Path(folder)) / "newest.json"
        self._store = DiskStore(Path(folder) / "states", fresh)

    @property
    def newest(self) -> Key:
        """The key of the last instruction that was begun."""
        return Key(*json.loads(self._guard.read_text())) if self._guard.exists() else NONE

    def begin(self, key: Key) -> None:
        """Note durably that an instruction is followed from here on; refuse one that is not newer than the last."""
        if key <= (newest := self.newest):
            raise StaleError(f"Instruction {key} is not newer than {newest}, which was followed already.")
        durable.write(self._guard, [json.dumps(key).encode()])

    def get(self, client: ClientId, key: Key) -> Memory:
        """The memory of a client under a key; that of round 0 for ``NONE``."""
        if key == NONE:
            return Memory(self._fresh())
        found = self._store.get(_name(client, key))
        if found is None:
            has = ", ".join(map(str, self.of(client))) or "none"
            raise LostStateError(
                f"The server counts on state {key} of client {client!r}, and this node has {has}. The node's folder was"
                " lost or replaced. Put it back, or begin a new run."
            )
        return found

    def of(self, client: ClientId) -> list[Key]:
        """The keys under which there are states of a client."""
        return sorted(key for key, cid in self._all() if cid == client)

    def keep(self, key: Key, memories: Mapping[ClientId, Memory]) -> None:
        """Write states durably, all or none."""
        if memories:
            self._commit({_name(client, key): memory for client, memory in memories.items()})

    def settle(self, named: Mapping[ClientId, Key | Iterable[Key]]) -> None:
        """Forget all states of these clients but those under the keys that the server names."""
        wanted = {client: {keys} if isinstance(keys, Key) else set(keys) for client, keys in named.items()}
        gone = [_name(client, key) for key, client in self._all() if client in wanted and key not in wanted[client]]
        if gone:
            self._commit({}, gone)

    def _commit(self, memories: Mapping[ClientId, Memory], removed: Iterable[ClientId] = ()) -> None:
        self._store.commit((self._store.round or 0) + 1, memories, removed=list(removed))

    def _all(self) -> Iterable[tuple[Key, ClientId]]:
        for name in self._store:
            client, key = json.loads(str(name))
            yield Key(*key), client

    def close(self) -> None:
        """Release the folder; may be called twice."""
        self._store.close()

    def __enter__(self) -> Versions:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def _name(client: ClientId, key: Key) -> str:
    return json.dumps([client, key])


def folder_of(state: Path, run: str) -> Path:
    """The folder of a run's states, whatever the run is called."""
    return state / name_of(run.encode())
