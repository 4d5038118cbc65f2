"""The process of a node that holds its data, module and states: answers frames that come over a local socket."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_fed.deploy.frames import FrameError
from lightning_fed.deploy.node import BrokenError
from lightning_fed.deploy.relay import SOCKET, receive, send

_log = logging.getLogger(__name__)

#: Seconds that the relay may take to send a frame, or to take its answer.
LIMIT = 60.0


@contextmanager
def listening(folder: Path) -> Iterator[socket.socket]:
    """A socket in a folder that only its owner may enter."""
    folder.chmod(0o700)
    (folder / SOCKET).unlink(missing_ok=True)
    directory = os.open(folder, os.O_RDONLY)
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(f"/proc/self/fd/{directory}/{SOCKET}")
            server.listen(16)
            yield server
    finally:
        os.close(directory)
        (folder / SOCKET).unlink(missing_ok=True)


def serve(server: socket.socket, follow: Callable[[bytes], bytes]) -> None:
    """Answer one frame after another, for ever.

    A node that is broken ends after it has said so; whoever looks after this process starts it again.
    A relay that goes away before it has its answer is nothing special: the server asks again.
    """
    while True:
        channel, _ = server.accept()
        with channel:
            channel.settimeout(LIMIT)
            try:
                frame = receive(channel)
                try:
                    answer = follow(frame)
                except BrokenError as broken:
                    send(channel, broken.answer)
                    raise
                send(channel, answer)
            except (FrameError, OSError) as error:
                _log.warning("An exchange with the relay ended early: %s", error)
