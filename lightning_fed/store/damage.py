"""The error for records that differ from what was written."""

from __future__ import annotations

from pathlib import Path

from lightning_fed.core.memory import ClientId


class DamagedRecordError(RuntimeError):
    """A record differs from what was written; the message names file, client and part.

    >>> str(DamagedRecordError(Path("a"), "x_i", "checksum differs", client="7", round=3))
    "a is damaged (client '7', round 3): x_i: checksum differs"
    """

    def __init__(
        self, path: Path, part: str, what: str, client: ClientId | None = None, round: int | None = None
    ) -> None:
        self.path, self.part, self.what, self.client, self.round = path, part, what, client, round
        whose = "" if round is None else f" ({owner(client)}, round {round})"
        super().__init__(f"{path} is damaged{whose}: {part}: {what}")


def owner(client: ClientId | None) -> str:
    """Name the client, or the server, that owns a record.

    >>> owner("a"), owner(None)
    ("client 'a'", 'server')
    """
    return "server" if client is None else f"client {_shortened(client)}"


def _shortened(client: ClientId) -> str:
    text = ascii(client) if isinstance(client, str) else repr(client)
    return text if len(text) <= 80 else f"{text[:77]}..."
