"""The tables of the index, and their rows."""

from __future__ import annotations

from hashlib import sha256
from typing import NamedTuple

from lightning_fed.core.memory import Cost, Summary

VERSION = 1

TABLES = f"""
PRAGMA user_version = {VERSION};
CREATE TABLE manifests (number INTEGER PRIMARY KEY, round INTEGER NOT NULL, sum BLOB NOT NULL);
CREATE TABLE clients (number INTEGER PRIMARY KEY, key BLOB NOT NULL UNIQUE);
CREATE TABLE files (number INTEGER PRIMARY KEY, name TEXT NOT NULL UNIQUE, bytes INTEGER NOT NULL,
    alive INTEGER NOT NULL);
CREATE INDEX hollow ON files (alive) WHERE alive * 2 < bytes;
CREATE TABLE records (number INTEGER PRIMARY KEY, client INTEGER NOT NULL, file INTEGER NOT NULL,
    start INTEGER NOT NULL, length INTEGER NOT NULL, digest BLOB NOT NULL, round INTEGER NOT NULL,
    visits INTEGER NOT NULL, bytes_down INTEGER NOT NULL, bytes_up INTEGER NOT NULL, steps INTEGER NOT NULL,
    gradients INTEGER NOT NULL, layout INTEGER NOT NULL, born INTEGER NOT NULL, died INTEGER);
CREATE INDEX living ON records (client) WHERE died IS NULL;
CREATE INDEX dead ON records (died) WHERE died IS NOT NULL;
CREATE INDEX held ON records (file);
"""
ROW = (
    "clients.key, files.name, start, length, digest, records.round, visits, bytes_down, bytes_up, steps, gradients,"
    " layout"
)
JOINED = "records JOIN clients ON clients.number = client JOIN files ON files.number = file"


class Row(NamedTuple):
    """The index entry of one record."""

    key: bytes
    file: str
    start: int
    length: int
    digest: bytes
    round: int
    visits: int
    bytes_down: int
    bytes_up: int
    steps: int
    gradients: int
    layout: int

    def sum(self) -> int:
        """Checksum of this row without file and offset; a manifest stores the exclusive or over all living rows."""
        said = repr((self.key, self.length, self.digest, *self[5:]))
        return int.from_bytes(sha256(said.encode()).digest(), "little")

    def summary(self) -> Summary:
        """The client's numbers in this row."""
        cost = Cost(self.bytes_down, self.bytes_up, self.steps, self.gradients)
        return Summary(self.visits, cost, self.length, self.round, self.layout)


class Moved(NamedTuple):
    """A record that a commit moves to another file."""

    number: int
    start: int
    length: int
    digest: bytes
