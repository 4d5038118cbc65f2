"""Open SQLite for the index: one connection, durable transactions, errors that name the file."""

from __future__ import annotations

import errno
import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_fed.store import durable
from lightning_fed.store.damage import DamagedRecordError
from lightning_fed.store.schema import TABLES, VERSION

#: By the name of SQLite's error, which Python has since 3.11: the system's number, and SQLite's message.
_REFUSALS = {
    "SQLITE_FULL": (errno.ENOSPC, "database or disk is full"),
    "SQLITE_READONLY": (errno.EROFS, "attempt to write a readonly database"),
    "SQLITE_PERM": (errno.EACCES, "access permission denied"),
    "SQLITE_CANTOPEN": (errno.EACCES, "unable to open database file"),
    "SQLITE_IOERR": (errno.EIO, "disk I/O error"),
}


class VersionError(RuntimeError):
    """A store was written by another version of this program."""


class Database:
    """One SQLite file, with the tables of an index; used by one process and one thread only.

    >>> from tempfile import mkdtemp
    >>> database = Database.create(Path(mkdtemp()) / "index.sqlite3")
    >>> with database.transaction() as connection:
    ...     _ = connection.execute("INSERT INTO clients (key) VALUES (?)", (b"s:a",))
    >>> database.close()
    """

    def __init__(self, path: Path, connection: sqlite3.Connection) -> None:
        self.path, self.connection = path, connection

    @classmethod
    def create(cls, path: Path) -> Database:
        """Open a database; make its tables if it is new."""
        if not path.exists():
            for ending in ("-wal", "-shm"):  # SQLite would replay the log of a removed database
                durable.remove(path.with_name(path.name + ending))
        self = cls(path, cls._connected(path))
        try:
            self.connection.execute("PRAGMA locking_mode = EXCLUSIVE")  # needs no shared memory: works on network disks
            self.connection.execute("PRAGMA journal_mode = WAL")
            self.connection.execute("PRAGMA synchronous = FULL")
            self.connection.execute("PRAGMA wal_autocheckpoint = 4000")
            self._make()
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise self.failure(error) from error
            raise
        return self

    @classmethod
    def of_snapshot(cls, path: Path) -> Database:
        """Open a database for reading only; immutable, so that SQLite writes no files next to it."""
        return cls(path, sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro&immutable=1", uri=True))

    @classmethod
    def copy_of(cls, database: Database, path: Path) -> Database:
        """Copy a database into one file, which the caller makes durable."""
        durable.remove(path)
        self = cls(path, cls._connected(path))
        try:
            database.connection.backup(self.connection)
            self.connection.execute("PRAGMA journal_mode = MEMORY")
            self.connection.execute("PRAGMA synchronous = OFF")
        except BaseException as error:
            self.close()
            if isinstance(error, sqlite3.DatabaseError):
                raise self.failure(error) from error
            raise
        return self

    @classmethod
    def _connected(cls, path: Path) -> sqlite3.Connection:
        try:
            # one thread at a time uses it; the last one, which closes it, may be one in which garbage was collected
            return sqlite3.connect(path, isolation_level=None, check_same_thread=False)
        except sqlite3.OperationalError as error:
            raise durable.WriteError.of(path, 0, OSError(errno.EACCES, str(error))) from error

    def _make(self) -> None:
        version = self.connection.execute("PRAGMA user_version").fetchone()[0]
        if version == 0:
            with self.transaction():
                for statement in filter(None, map(str.strip, TABLES.split(";"))):
                    self.connection.execute(statement)
        elif version != VERSION:
            raise VersionError(f"{self.path} has format version {version}, this program reads {VERSION}.")

    @contextmanager
    def transaction(self) -> Iterator[sqlite3.Connection]:
        """Run a durable transaction: all changes or none."""
        try:
            self.connection.execute("BEGIN IMMEDIATE")
            yield self.connection
            durable.point("index: before commit")
            self.connection.execute("COMMIT")
        except BaseException as error:
            if self.connection.in_transaction:
                self.connection.execute("ROLLBACK")
            if isinstance(error, sqlite3.DatabaseError):
                raise self.failure(error) from error
            raise
        durable.point("index: committed")

    def failure(self, error: sqlite3.Error) -> Exception:
        """Translate an error of SQLite: the disk refused a write, or the file is damaged."""
        name = getattr(error, "sqlite_errorname", "")
        for prefix, (number, message) in _REFUSALS.items():
            if name.startswith(prefix) or (not name and str(error) == message):
                size = self.path.stat().st_size if self.path.exists() else 0
                return durable.WriteError.of(self.path, size, OSError(number, str(error)))
        return DamagedRecordError(self.path, "index", str(error))

    def close(self) -> None:
        """Close the connection."""
        self.connection.close()
