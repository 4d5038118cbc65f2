"""Recent records in RAM, bounded by their bytes."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from lightning_fed.store.records import Record


class Recent:
    """The most recently used records. Lookup needs the digest of the record, so an outdated record is never found.

    >>> import torch
    >>> recent = Recent(most=10)
    >>> recent.keep(b"a", b"1", Record("a", 0, {"x": torch.ones(2)}))
    >>> recent.find(b"a", b"2") is None, recent.find(b"a", b"1").client, recent.bytes
    (True, 'a', 8)
    >>> recent.keep(b"b", b"1", Record("b", 0, {"x": torch.ones(2)}))
    >>> recent.find(b"a", b"1") is None, len(recent)
    (True, 1)
    """

    def __init__(self, most: int) -> None:
        self.most = most
        self.bytes = 0
        self._entries: OrderedDict[bytes, tuple[bytes, Record]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._entries)

    def find(self, key: bytes, digest: bytes) -> Record | None:
        """Return the record of this key and digest, and mark it as used."""
        found = self._entries.get(key)
        if found is None or found[0] != digest:
            return None
        self._entries.move_to_end(key)
        return found[1]

    def keep(self, key: bytes, digest: bytes, record: Record) -> None:
        """Store a record, and drop the least recently used ones while there are too many bytes."""
        self.drop(key)
        if record.bytes > self.most:
            return
        self._entries[key] = digest, _compact(record)
        self.bytes += record.bytes
        while self.bytes > self.most:
            self.drop(next(iter(self._entries)))

    def drop(self, key: bytes) -> None:
        """Remove a record."""
        if (found := self._entries.pop(key, None)) is not None:
            self.bytes -= found[1].bytes


def _compact(record: Record) -> Record:
    """Copy tensors that are views, such as a client's row of a stack, because they keep the whole storage in memory."""
    tensors = (*record.tensors.values(), *record.buffers.values())
    if all(tensor.untyped_storage().nbytes() <= tensor.nbytes for tensor in tensors):
        return record
    return replace(record, tensors=_copies(record.tensors), buffers=_copies(record.buffers))


def _copies(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor.detach().clone() for name, tensor in tensors.items()}
