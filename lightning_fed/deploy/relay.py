"""The ClientApp: hands frames to the node's own process and its answers back.

Flower starts it anew for every message, and sends its code from the server. So it imports nothing but Flower and the
standard library, and holds no data: those are with the process that listens on the socket in the node's folder.
"""

import os
import socket
import threading
import time

from flwr.app import Array, ArrayRecord, Context, Message, RecordDict
from flwr.clientapp import ClientApp

FOLDER = "LIGHTNING_FED_NODE"  # environment variable: the node's folder
SOCKET = "node.sock"
PATIENCE = 120.0  # seconds that a node's process may take to start
KIND = "lightning_fed.frame"

app = ClientApp()


@app.query()  # type: ignore[untyped-decorator,unused-ignore]
def relay(message: Message, context: Context) -> Message:
    """The node's answer to a frame."""
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    answer = asked(os.environ[FOLDER], frame_of(message), message.metadata.ttl)
    return Message(content_of(answer), reply_to=message)


def _end_with(parent: int) -> None:
    """End this process when the one that started it is gone: nobody waits for the answer."""
    while os.getppid() == parent:
        time.sleep(0.5)
    os._exit(1)


def content_of(frame: bytes) -> RecordDict:
    """A frame as the content of a message: one array of bytes, which Flower sends in pieces of 5 MB."""
    array = Array(dtype="uint8", shape=(len(frame),), stype=KIND, data=frame)
    return RecordDict({"frame": ArrayRecord({"frame": array})})


def frame_of(message: Message) -> bytes:
    """The frame in a message; nothing in it is interpreted."""
    array = message.content["frame"]["frame"]
    if not isinstance(array, Array) or array.stype != KIND:
        raise ValueError(f"The message holds a {getattr(array, 'stype', type(array).__name__)}, not a frame.")
    return bytes(array.data)


def asked(folder: str, frame: bytes, timeout: float) -> bytes:
    """What the process that listens in a folder answers to a frame."""
    with connected(folder, min(timeout, PATIENCE)) as channel:
        channel.settimeout(timeout)
        send(channel, frame)
        return receive(channel)


def connected(folder: str, patience: float) -> socket.socket:
    """A connection to the socket in a folder, as soon as there is one."""
    end = time.monotonic() + patience
    while True:
        directory = os.open(folder, os.O_RDONLY)  # a socket's path is short: at most 107 bytes
        channel = socket.socket(socket.AF_UNIX)
        try:
            channel.connect(f"/proc/self/fd/{directory}/{SOCKET}")
            return channel
        except OSError:
            channel.close()
            if time.monotonic() > end:
                raise
            time.sleep(0.2)
        finally:
            os.close(directory)


def send(channel: socket.socket, frame: bytes) -> None:
    """Send a frame after its length."""
    channel.sendall(len(frame).to_bytes(8, "little"))
    channel.sendall(frame)


def receive(channel: socket.socket) -> bytes:
    """Receive a frame after its length."""
    return _exactly(channel, int.from_bytes(_exactly(channel, 8), "little"))


def _exactly(channel: socket.socket, size: int) -> bytes:
    found = bytearray()
    while len(found) < size:
        piece = channel.recv(min(2**20, size - len(found)))
        if not piece:
            raise ConnectionError(f"The node's process ended after {len(found)} of {size} bytes.")
        found += piece
    return bytes(found)
