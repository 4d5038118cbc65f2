"""Flower as the transport: the one file that imports it in the server's process."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from flwr.app import Message

from lightning_fed.deploy.relay import content_of, frame_of
from lightning_fed.deploy.transport import TransportError

#: Seconds between looks for answers.
POLL = 0.2


class FlowerTransport:
    """Carries frames by a ServerApp's ``Grid``.

    Flower authenticates nodes by their registered keys, encrypts by TLS, and cuts frames into pieces of 5 MB.
    """

    def __init__(self, grid: Any) -> None:
        self.grid = grid

    def nodes(self) -> set[int]:
        """The nodes that Flower takes for connected."""
        with _named():
            return set(self.grid.get_node_ids())

    def exchange(self, frames: Mapping[int, bytes], timeout: float) -> Iterator[tuple[int, bytes | None]]:
        """Send a frame to each node, and yield their answers as they come, for ``timeout`` seconds at most."""
        end = time.monotonic() + timeout
        waiting: dict[str, int] = {}
        for node, frame in frames.items():  # one by one: Flower would hold all of them in one request
            message = Message(content_of(frame), dst_node_id=node, message_type="query", ttl=timeout)
            with _named():
                (name,) = self.grid.push_messages([message])
            if name:
                waiting[name] = node
        while waiting and time.monotonic() < end:
            with _named():
                replies = list(self.grid.pull_messages(list(waiting)))
            for reply in replies:
                if (name := reply.metadata.reply_to_message_id) in waiting:
                    node = waiting.pop(name)
                    yield node, self._frame(reply, node)
            time.sleep(POLL)

    @staticmethod
    def _frame(reply: Message, node: int) -> bytes | None:
        """The frame of a reply; None for an error of the node, or a reply of another node."""
        if reply.has_error() or reply.metadata.src_node_id != node:
            return None
        try:
            return frame_of(reply)
        except (KeyError, TypeError, ValueError, AttributeError):
            return None


@contextmanager
def _named() -> Iterator[None]:
    """Tell errors of Flower's calls from errors of our own."""
    try:
        yield
    except Exception as error:  # Flower passes on whatever its HTTP client raises
        raise TransportError(f"Flower: {type(error).__name__}: {error}") from error
