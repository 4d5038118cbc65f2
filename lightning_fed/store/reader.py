"""Read records: recent ones from RAM, others from read-ahead or from their files."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from lightning_fed.store.cache import Recent
from lightning_fed.store.files import location_of
from lightning_fed.store.read_ahead import ReadAhead
from lightning_fed.store.records import Record, read
from lightning_fed.store.schema import Row


class Reader:
    """The records of a folder, by their rows in the index; at most ``most`` bytes of recent ones stay in RAM.

    >>> import torch
    >>> from tempfile import mkdtemp
    >>> from lightning_fed.store.files import write_alone
    >>> folder = Path(mkdtemp())
    >>> row = write_alone(folder, Record("a", 3, {"x": torch.ones(2)}))
    >>> reader = Reader(folder, most=100)
    >>> reader.ahead([row]); reader.record(row).tensors, reader.recent.bytes
    ({'x': tensor([1., 1.])}, 8)
    >>> reader.close()
    """

    def __init__(self, folder: Path, most: int) -> None:
        self.folder = folder
        self.recent = Recent(most)
        self._ahead = ReadAhead(most)

    def record(self, row: Row) -> Record:
        """The record of a row, verified when it was read."""
        location = location_of(self.folder, row)
        found = self.recent.find(row.key, row.digest)
        if found is None:
            found = self._ahead.take(row.key, location) or read(location)
            self.keep(row, found)
        return found

    def keep(self, row: Row, record: Record) -> None:
        """Keep a record that was just written."""
        self.recent.keep(row.key, row.digest, record)

    def ahead(self, rows: Iterable[Row]) -> None:
        """Read the records of these rows in the background, in this order."""
        missing = [row for row in rows if self.recent.find(row.key, row.digest) is None]
        self._ahead.ask((row.key, location_of(self.folder, row)) for row in missing)

    def quiesce(self) -> None:
        """Wait until no record is being read."""
        self._ahead.quiesce()

    def close(self) -> None:
        """Stop reading ahead."""
        self._ahead.close()
