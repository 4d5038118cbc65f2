"""The one door to a network: what the server needs of Flower, or of another engine in its place."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Protocol


class TransportError(ConnectionError):
    """The transport itself is gone; the server ends, and resumes from its journal when it is started again."""


class Transport(Protocol):
    """Carries frames between the server and nodes; knows nothing of what is in them.

    It authenticates nodes: an answer that :meth:`exchange` yields for a node comes from that node.
    """

    def nodes(self) -> set[int]:
        """The nodes that are connected now."""

    def exchange(self, frames: Mapping[int, bytes], timeout: float) -> Iterator[tuple[int, bytes | None]]:
        """Send a frame to each node, and yield their answers as they come, for ``timeout`` seconds at most.

        None is for a node that has reported a failure of its own. An answer that comes later is never yielded.
        """
