"""The index of a store: which record of which client lies where, in one SQLite database.

A manifest is what the store held after one commit. A record belongs to the manifests from ``born`` up to, but not
including, ``died``. The two newest manifests are kept; one transaction moves from one manifest to the next.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from lightning_fed.core.memory import Cost
from lightning_fed.store import durable
from lightning_fed.store.identity import SERVER

VERSION = 1

_TABLES = f"""
PRAGMA user_version = {VERSION};
CREATE TABLE manifests (number INTEGER PRIMARY KEY, round INTEGER NOT NULL);
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
_ROW = (
    "clients.key, files.name, start, length, digest, records.round, visits, bytes_down, bytes_up, steps, gradients,"
    " layout"
)
_JOINED = "records JOIN clients ON clients.number = client JOIN files ON files.number = file"


class Row(NamedTuple):
    """One record as the index knows it."""

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

    @property
    def cost(self) -> Cost:
        return Cost(self.bytes_down, self.bytes_up, self.steps, self.gradients)


class Moved(NamedTuple):
    """A record that a commit moves to another file."""

    number: int
    start: int
    length: int
    digest: bytes


class VersionError(RuntimeError):
    """A store was written by another version of this program."""


class Index:
    """The database; used by one process and one thread only.

    >>> from tempfile import mkdtemp
    >>> index = Index(Path(mkdtemp()) / "index.sqlite3")
    >>> row = Row(b"s:a", "f", 0, 8, b"digest", 3, 1, 0, 0, 0, 0, 0)
    >>> index.commit(3, [row], {"f": 8}, [])
    []
    >>> index.find(b"s:a").round, index.rounds
    (3, [3])
    >>> index.close()
    """

    def __init__(self, path: Path) -> None:
        if not path.exists():
            for ending in ("-wal", "-shm"):  # of another database: SQLite would replay it
                durable.remove(path.with_name(path.name + ending))
        self.path = path
        self.connection = sqlite3.connect(path, isolation_level=None)
        try:
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            self._make()
        except BaseException:
            self.connection.close()
            raise

    @classmethod
    def of_snapshot(cls, path: Path) -> Index:
        """A database that is only read, and beside which nothing is written."""
        index = cls.__new__(cls)
        index.path = path
        index.connection = sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True)
        return index

    def _make(self) -> None:
        version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self._transaction():
                for statement in filter(None, map(str.strip, _TABLES.split(";"))):
                    self.connection.execute(statement)
        elif version != VERSION:
            raise VersionError(f"{self.path} has format version {version}, this program reads {VERSION}.")

    @contextmanager
    def _transaction(self) -> Iterator[None]:
        self.connection.execute("BEGIN IMMEDIATE")
        try:
            yield
            durable.point("index: before commit")
            self.connection.execute("COMMIT")
        except BaseException:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            raise
        durable.point("index: committed")

    @property
    def rounds(self) -> list[int]:
        """The rounds of the kept manifests, oldest first."""
        return [round for (round,) in self.connection.execute("SELECT round FROM manifests ORDER BY number")]

    def find(self, key: bytes) -> Row | None:
        """The living record of a client."""
        query = f"SELECT {_ROW} FROM {_JOINED} WHERE clients.key = ? AND died IS NULL"
        found = self.connection.execute(query, (key,)).fetchone()
        return None if found is None else Row(*found)

    def rows(self, *, server: bool = False) -> Iterator[Row]:
        """All living records of clients (and of the server), in the order of their first visits."""
        query = f"SELECT {_ROW} FROM {_JOINED} WHERE died IS NULL AND clients.key != ? ORDER BY client"
        yield from map(Row._make, self.connection.execute(query, (b"" if server else SERVER,)))

    def count(self) -> int:
        """How many clients have a living record."""
        query = "SELECT count(*) FROM records JOIN clients ON clients.number = client WHERE died IS NULL AND key != ?"
        count: int = self.connection.execute(query, (SERVER,)).fetchone()[0]
        return count

    def has_file(self, name: str) -> bool:
        """Whether a kept manifest names this file."""
        return self.connection.execute("SELECT 1 FROM files WHERE name = ?", (name,)).fetchone() is not None

    def files(self) -> dict[str, int]:
        """All files that a kept manifest names, with their sizes."""
        return dict(self.connection.execute("SELECT name, bytes FROM files"))

    def hollow(self, most: int) -> Iterator[tuple[str, list[Moved]]]:
        """Segments less than half alive, the emptiest first, up to ``most`` bytes alive; and the records they hold."""
        query = "SELECT number, name, alive FROM files WHERE alive * 2 < bytes AND alive <= ? ORDER BY alive LIMIT 100"
        for number, name, alive in self.connection.execute(query, (most,)).fetchall():
            if (most := most - alive) < 0:
                return
            held = "SELECT number, start, length, digest FROM records WHERE file = ? ORDER BY start"
            yield name, [Moved(*found) for found in self.connection.execute(held, (number,))]

    def commit(
        self, round: int, rows: Sequence[Row], files: dict[str, int], moved: Iterable[tuple[str, Moved]]
    ) -> list[str]:
        """Move to the next manifest in one transaction; return the files that no kept manifest names any more.

        Args:
            rows: the records that are new.
            files: the files that are new, with their sizes.
            moved: records of older files with the new file and place of each.
        """
        with self._transaction():
            (last,) = self.connection.execute("SELECT max(number) FROM manifests").fetchone()
            now = 0 if last is None else last + 1
            self.connection.execute("INSERT INTO manifests VALUES (?, ?)", (now, round))
            self.connection.execute("DELETE FROM manifests WHERE number < ?", (now - 1,))
            self.connection.executemany(
                "INSERT INTO files (name, bytes, alive) VALUES (?, ?, 0) ON CONFLICT DO NOTHING", files.items()
            )
            for name, record in moved:
                self._move(name, record)
            for row in rows:
                self._add(row, now)
            return self._forget(now - 1)

    def _move(self, name: str, record: Moved) -> None:
        change = "UPDATE files SET alive = alive + ? WHERE"
        (old,) = self.connection.execute("SELECT file FROM records WHERE number = ?", (record.number,)).fetchone()
        self.connection.execute(f"{change} number = ?", (-record.length, old))
        self.connection.execute(f"{change} name = ?", (record.length, name))
        self.connection.execute(
            "UPDATE records SET file = (SELECT number FROM files WHERE name = ?), start = ? WHERE number = ?",
            (name, record.start, record.number),
        )
        self.connection.execute("DELETE FROM files WHERE number = ? AND alive = 0", (old,))

    def _add(self, row: Row, now: int) -> None:
        self.connection.execute("INSERT INTO clients (key) VALUES (?) ON CONFLICT DO NOTHING", (row.key,))
        (client,) = self.connection.execute("SELECT number FROM clients WHERE key = ?", (row.key,)).fetchone()
        (file,) = self.connection.execute("SELECT number FROM files WHERE name = ?", (row.file,)).fetchone()
        self.connection.execute("UPDATE files SET alive = alive + ? WHERE number = ?", (row.length, file))
        self.connection.execute("UPDATE records SET died = ? WHERE client = ? AND died IS NULL", (now, client))
        self.connection.execute(
            f"INSERT INTO records VALUES (NULL, {', '.join('?' * 13)}, NULL)", (client, file, *row[2:], now)
        )

    def _forget(self, before: int) -> list[str]:
        """Drop records that died up to manifest ``before``; return the files that hold none any more."""
        dead = self.connection.execute(
            "SELECT number, file, length FROM records WHERE died <= ? AND died IS NOT NULL", (before,)
        ).fetchall()
        return self._drop(dead)

    def _drop(self, dead: Sequence[tuple[int, int, int]]) -> list[str]:
        empty: list[str] = []
        for number, file, length in dead:
            self.connection.execute("DELETE FROM records WHERE number = ?", (number,))
            self.connection.execute("UPDATE files SET alive = alive - ? WHERE number = ?", (length, file))
            gone = self.connection.execute(
                "DELETE FROM files WHERE number = ? AND alive = 0 RETURNING name", (file,)
            ).fetchone()
            empty += gone or ()
        return empty

    def roll_back(self) -> list[str]:
        """Return to the older of the two kept manifests; return the files that are not named any more."""
        with self._transaction():
            numbers = [n for (n,) in self.connection.execute("SELECT number FROM manifests ORDER BY number")]
            if len(numbers) < 2:
                raise ValueError("There is no older manifest to return to.")
            newest = numbers[-1]
            born = "SELECT number, file, length FROM records WHERE born = ?"
            empty = self._drop(self.connection.execute(born, (newest,)).fetchall())
            self.connection.execute("UPDATE records SET died = NULL WHERE died = ?", (newest,))
            self.connection.execute("DELETE FROM manifests WHERE number = ?", (newest,))
            return empty

    def copy(self, path: Path) -> dict[str, int]:
        """Write the newest manifest alone as a database of its own, in one file; return the files that it names."""
        copied = Index.__new__(Index)
        durable.remove(path)
        copied.path, copied.connection = path, sqlite3.connect(path, isolation_level=None)
        try:
            self.connection.backup(copied.connection)
            copied.connection.execute("PRAGMA journal_mode = MEMORY")  # the caller makes the file durable
            copied.connection.execute("PRAGMA synchronous = OFF")
            copied.drop_older()
            return copied.files()
        finally:
            copied.close()

    def drop_older(self) -> list[str]:
        """Keep the newest manifest alone; return the files that are not named any more."""
        with self._transaction():
            (newest,) = self.connection.execute("SELECT max(number) FROM manifests").fetchone()
            self.connection.execute("DELETE FROM manifests WHERE number < ?", (newest,))
            return self._forget(-1 if newest is None else newest)

    def close(self) -> None:
        self.connection.close()
