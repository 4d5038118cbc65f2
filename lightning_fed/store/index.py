"""The index of a store: the file and offset of each client's records, in one SQLite database.

A manifest is the content of the store after one commit. A record belongs to the manifests from ``born`` up to, but not
including, ``died``. The two newest manifests are kept; one transaction leads from one manifest to the next.
"""

from __future__ import annotations

import sqlite3
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning_fed.store.damage import DamagedRecordError
from lightning_fed.store.database import Database
from lightning_fed.store.identity import SERVER
from lightning_fed.store.schema import JOINED, ROW, Moved, Row

_PAGE = 1000


class Index:
    """The database; used by one process and one thread only.

    >>> from tempfile import mkdtemp
    >>> index = Index.open(Path(mkdtemp()) / "index.sqlite3")
    >>> row = Row(b"s:a", "f", 0, 8, b"digest", 3, 1, 0, 0, 0, 0, 0)
    >>> index.commit(3, [row], {"f": 8})
    []
    >>> index.find(b"s:a").round, index.rounds
    (3, [3])
    >>> index.close()
    """

    def __init__(self, database: Database) -> None:
        self.database, self.connection = database, database.connection
        self.newest: tuple[Any, ...] | None = None  # arguments of the last commit

    @classmethod
    def open(cls, path: Path) -> Index:
        """Open and check the index in this file; create an empty one if there is no file."""
        index = cls(Database.create(path))
        try:
            index._check()
        except BaseException as error:
            index.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise index.database.failure(error) from error
            raise
        return index

    @classmethod
    def of_snapshot(cls, path: Path) -> Index:
        """Open the index of a snapshot for reading only."""
        return cls(Database.of_snapshot(path))

    def _check(self) -> None:
        """Compare the living records with their checksum in the newest manifest."""
        (found,) = self.connection.execute("PRAGMA integrity_check(1)").fetchone()
        if found != "ok":
            raise DamagedRecordError(self.database.path, "index", str(found))
        noted = self.connection.execute("SELECT sum FROM manifests ORDER BY number DESC LIMIT 1").fetchone()
        total = 0
        for row in self.rows(server=True):
            total ^= row.sum()
        if total != (0 if noted is None else int.from_bytes(noted[0], "little")):
            raise DamagedRecordError(
                self.database.path, "index", "its records are not those that its newest manifest counted"
            )

    @property
    def rounds(self) -> list[int]:
        """The rounds of the kept manifests, oldest first."""
        return [round for (round,) in self.connection.execute("SELECT round FROM manifests ORDER BY number")]

    def find(self, key: bytes) -> Row | None:
        """The living record of a client."""
        query = f"SELECT {ROW} FROM {JOINED} WHERE clients.key = ? AND died IS NULL"
        found = self.connection.execute(query, (key,)).fetchone()
        return None if found is None else Row(*found)

    def rows(self, *, server: bool = False) -> Iterator[Row]:
        """All living records of clients (and of the server), in the order of their first visits.

        Reads a page at a time, so that no query is open when the caller commits between two records.
        """
        query = f"SELECT client, {ROW} FROM {JOINED} WHERE died IS NULL AND client > ? ORDER BY client LIMIT {_PAGE}"
        last = 0
        while found := self.connection.execute(query, (last,)).fetchall():
            last = found[-1][0]
            yield from (Row(*rest) for _, *rest in found if server or rest[0] != SERVER)

    def count(self) -> int:
        """Number of clients with a living record."""
        query = "SELECT count(*) FROM records JOIN clients ON clients.number = client WHERE died IS NULL AND key != ?"
        count: int = self.connection.execute(query, (SERVER,)).fetchone()[0]
        return count

    def has_file(self, name: str) -> bool:
        """Whether a kept manifest names this file."""
        return self.connection.execute("SELECT 1 FROM files WHERE name = ?", (name,)).fetchone() is not None

    def files(self) -> dict[str, int]:
        """All files that a kept manifest names, with their sizes."""
        return dict(self.connection.execute("SELECT name, bytes FROM files"))

    def hollow(self, most: int, but: str) -> Iterator[tuple[str, list[Moved]]]:
        """Yield records of segments with less than half living bytes, up to ``most`` bytes; skip the file ``but``."""
        query = "SELECT number, name FROM files WHERE alive * 2 < bytes AND name != ? ORDER BY alive LIMIT 10"
        for number, name in self.connection.execute(query, (but,)).fetchall():
            held = "SELECT number, start, length, digest FROM records WHERE file = ?"
            chosen = []
            for found in map(Moved._make, self.connection.execute(held, (number,))):
                if (most := most - found.length) < 0:
                    break
                chosen.append(found)
            yield name, chosen

    def commit(
        self,
        round: int,
        rows: Sequence[Row],
        files: Mapping[str, int],
        moved: Iterable[tuple[str, Moved]] = (),
        removed: Sequence[bytes] = (),
    ) -> list[str]:
        """Write the next manifest in one transaction; return the files that no kept manifest names any more.

        Args:
            rows: the new records.
            files: the new files, with their sizes.
            moved: records of older files, with the new file and offset of each.
            removed: keys of clients whose records end.
        """
        moved = list(moved)
        with self.database.transaction():
            newest = "SELECT number, sum FROM manifests ORDER BY number DESC LIMIT 1"
            last, before = self.connection.execute(newest).fetchone() or (-1, b"")
            now, total = last + 1, self._changed(int.from_bytes(before, "little"), rows, removed)
            self.connection.execute(
                "INSERT INTO manifests VALUES (?, ?, ?)", (now, round, total.to_bytes(32, "little"))
            )
            self.connection.execute("DELETE FROM manifests WHERE number < ?", (now - 1,))
            self.connection.executemany(
                "INSERT INTO files (name, bytes, alive) VALUES (?, ?, 0)"
                " ON CONFLICT DO UPDATE SET bytes = excluded.bytes",
                files.items(),
            )
            emptied = [self._move(name, record) for name, record in moved]
            for key in (*removed, *(row.key for row in rows)):
                self._end(key, now)
            for row in rows:
                self._add(row, now)
            self.newest = round, list(rows), dict(files), moved, list(removed)
            return self._forget(now - 1) + [name for name in emptied if name is not None]

    def _changed(self, total: int, rows: Sequence[Row], removed: Sequence[bytes]) -> int:
        """The checksum of the living records after ``rows`` have replaced their clients' older records."""
        for key in (*removed, *(row.key for row in rows)):
            if (older := self.find(key)) is not None:
                total ^= older.sum()
        for row in rows:
            total ^= row.sum()
        return total

    def _end(self, key: bytes, now: int) -> None:
        query = "UPDATE records SET died = ? WHERE died IS NULL AND client = (SELECT number FROM clients WHERE key = ?)"
        self.connection.execute(query, (now, key))

    def _move(self, name: str, record: Moved) -> str | None:
        """Move a record to another file; return the name of its old file if that has no records left."""
        change = "UPDATE files SET alive = alive + ? WHERE"
        (old,) = self.connection.execute("SELECT file FROM records WHERE number = ?", (record.number,)).fetchone()
        self.connection.execute(f"{change} number = ?", (-record.length, old))
        self.connection.execute(f"{change} name = ?", (record.length, name))
        self.connection.execute(
            "UPDATE records SET file = (SELECT number FROM files WHERE name = ?), start = ? WHERE number = ?",
            (name, record.start, record.number),
        )
        return self._drop_file(old)

    def _add(self, row: Row, now: int) -> None:
        self.connection.execute("INSERT INTO clients (key) VALUES (?) ON CONFLICT DO NOTHING", (row.key,))
        (client,) = self.connection.execute("SELECT number FROM clients WHERE key = ?", (row.key,)).fetchone()
        (file,) = self.connection.execute("SELECT number FROM files WHERE name = ?", (row.file,)).fetchone()
        self.connection.execute("UPDATE files SET alive = alive + ? WHERE number = ?", (row.length, file))
        self.connection.execute(
            f"INSERT INTO records VALUES (NULL, {', '.join('?' * 13)}, NULL)", (client, file, *row[2:], now)
        )

    def _forget(self, before: int) -> list[str]:
        """Drop records that died up to manifest ``before``; return the files that have no records left."""
        dead = self.connection.execute(
            "SELECT number, file, length FROM records WHERE died <= ? AND died IS NOT NULL", (before,)
        ).fetchall()
        return self._drop(dead)

    def _drop(self, dead: Sequence[tuple[int, int, int]]) -> list[str]:
        empty: list[str] = []
        for number, file, length in dead:
            self.connection.execute("DELETE FROM records WHERE number = ?", (number,))
            self.connection.execute("UPDATE files SET alive = alive - ? WHERE number = ?", (length, file))
            if (gone := self._drop_file(file)) is not None:
                empty.append(gone)
        return empty

    def _drop_file(self, number: int) -> str | None:
        """Drop a file that has no records left; return its name, or None if it has some."""
        query = "SELECT name FROM files WHERE number = ? AND alive = 0"
        if (found := self.connection.execute(query, (number,)).fetchone()) is None:
            return None
        self.connection.execute("DELETE FROM files WHERE number = ?", (number,))
        name: str = found[0]
        return name

    def roll_back(self) -> list[str]:
        """Return to the older of the two kept manifests; return the files that are not named any more."""
        with self.database.transaction():
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
        """Write the newest manifest alone to a separate database file; return the files that it names."""
        copied = Index(Database.copy_of(self.database, path))
        try:
            copied.drop_older()
            return copied.files()
        finally:
            copied.close()

    def drop_older(self) -> list[str]:
        """Keep the newest manifest alone; return the files that are not named any more."""
        with self.database.transaction():
            (newest,) = self.connection.execute("SELECT max(number) FROM manifests").fetchone()
            self.connection.execute("DELETE FROM manifests WHERE number < ?", (newest,))
            return self._forget(-1 if newest is None else newest)

    def close(self) -> None:
        """Close the database."""
        self.database.close()
