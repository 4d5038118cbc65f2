"""One client's memory as a safetensors record, with checksums over everything.

The header's ``__metadata__`` holds the identity (client, round), the numbers of a memory, and a SHA-256 of every
tensor's bytes; its first entry is the SHA-256 of the header itself, computed with zeros in place of that entry. So the
header's digest covers the whole record, and damage can be located by tensor. Nothing is pickled.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path
from typing import Any, BinaryIO

import torch
from torch import Tensor

from lightning_fed.core.memory import ClientId, Cost, Memory, tensors_of
from lightning_fed.store.damage import DamagedRecordError, owner

VERSION = 1

_BLANK = "0" * 64
_OPENING = b'{"__metadata__":{"sha256":"'
_SEALED = slice(len(_OPENING), len(_OPENING) + len(_BLANK))
_MOST_HEADER = 2**26  # a larger length in a file means damage
_DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "I16": torch.int16, "I8": torch.int8,
    "U64": torch.uint64, "U32": torch.uint32, "U16": torch.uint16, "U8": torch.uint8,
    "BOOL": torch.bool, "C64": torch.complex64, "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
}  # fmt: skip
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True, eq=False)
class Record:
    """The data of one client after one round, as they are written; of the server if ``client`` is None.

    ``visits`` and ``cost`` are not in the file but in the index: a record is written while its round goes on.

    >>> Record("a", 3, {"x_i": torch.ones(2)}, visits=1).bytes
    8
    """

    client: ClientId | None
    round: int
    tensors: Mapping[str, Tensor]
    buffers: Mapping[str, Tensor] = field(default_factory=dict)
    visits: int = 0
    cost: Cost = Cost()
    layout: int = 0

    @classmethod
    def of(cls, client: ClientId, memory: Memory, round: int) -> Record:
        """The record of a client's memory after ``round``."""
        tensors = {} if memory.state is None else tensors_of(memory.state)
        return cls(client, round, tensors, memory.buffers, memory.visits, memory.cost, memory.layout)

    @property
    def bytes(self) -> int:
        """Bytes of all tensors."""
        return sum(tensor.nbytes for tensor in (*self.tensors.values(), *self.buffers.values()))


@dataclass(frozen=True, eq=False)
class Encoded:
    """An encoded record: the header and views of the tensors' memory, without copies."""

    header: bytes
    data: list[memoryview]
    digest: bytes

    @property
    def buffers(self) -> list[bytes | memoryview]:
        return [self.header, *self.data]

    @property
    def length(self) -> int:
        return len(self.header) + sum(len(view) for view in self.data)


@dataclass(frozen=True)
class Location:
    """File, offset and expected digest of a record; may be sent to another process.

    >>> Location(Path("records/a"), 0, 8, b"digest", "a", 3).client
    'a'
    """

    path: Path
    offset: int
    length: int
    digest: bytes
    client: ClientId | None
    round: int


def encode(record: Record) -> Encoded:
    """Encode a record as safetensors.

    >>> from lightning_fed.store.durable import write
    >>> from tempfile import mkdtemp
    >>> encoded = encode(Record("a", 3, {"x_i": torch.ones(2)}, visits=1))
    >>> path = Path(mkdtemp()) / "a"
    >>> location = Location(path, 0, write(path, encoded.buffers), encoded.digest, "a", 3)
    >>> read(location).tensors
    {'x_i': tensor([1., 1.])}
    """
    entries: dict[str, Any] = {}
    sums, odd, data, at = {}, {}, [], 0
    for name, tensor in _named(record):
        view = _bytes_of(tensor)
        dtype, shape = _NAMES.get(tensor.dtype), list(tensor.shape)
        if dtype is None:  # safetensors has no name for this dtype, so write bytes and note the dtype in the metadata
            odd[name], dtype, shape = [str(tensor.dtype).removeprefix("torch."), shape], "U8", [len(view)]
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [at, at + len(view)]}
        sums[name] = sha256(view).hexdigest()
        data.append(view)
        at += len(view)
    metadata = {"sha256": _BLANK, "format": "pt", "lightning_fed": str(VERSION), "client": json.dumps(record.client)}
    facts = {"round": record.round, "layout": record.layout}
    metadata |= {name: json.dumps(value) for name, value in {**facts, "sums": sums, "dtypes": odd}.items()}
    header = bytearray(json.dumps({"__metadata__": metadata, **entries}, separators=(",", ":")).encode())
    header += b" " * (-len(header) % 8)
    digest = sha256(header)
    header[_SEALED] = digest.hexdigest().encode()
    return Encoded(len(header).to_bytes(8, "little") + header, data, digest.digest())


def _named(record: Record) -> Iterator[tuple[str, Tensor]]:
    for prefix, tensors in (("state/", record.tensors), ("buffers/", record.buffers)):
        for name, tensor in tensors.items():
            yield prefix + name, tensor


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    return _view(plain)


def _view(plain: Tensor) -> memoryview:
    flat: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    return memoryview(flat)


def read(location: Location) -> Record:
    """Read a record and verify all of it; raise DamagedRecordError if it differs from what was written.

    >>> read(Location(Path("a"), 0, 8, b"digest", 1, 3))
    Traceback (most recent call last):
        ...
    lightning_fed.store.damage.DamagedRecordError: a is damaged (client 1, round 3): file: No such file or directory
    """
    return _Reading(location).record()


class _Reading:
    """One pass over one record."""

    def __init__(self, location: Location) -> None:
        self.location = location

    def record(self) -> Record:
        where = self.location
        try:
            with where.path.open("rb") as file:
                file.seek(where.offset)
                header = self._header(file)
                metadata = self._metadata(header)
                found = {name: self._tensor(file, name, entry, metadata) for name, entry in header.items()}
        except OSError as error:
            raise self._damage("file", error.strerror or str(error)) from error
        parts: dict[str, dict[str, Tensor]] = {"state": {}, "buffers": {}}
        for name, tensor in found.items():
            kind, _, own = name.partition("/")
            parts[kind][own] = tensor
        return Record(where.client, where.round, parts["state"], parts["buffers"], layout=metadata["layout"])

    def _header(self, file: BinaryIO) -> dict[str, Any]:
        size = int.from_bytes(self._exactly(file, 8, "header"), "little")
        if not len(_OPENING) + len(_BLANK) < size <= min(_MOST_HEADER, self.location.length - 8):
            raise self._damage("header", f"its length cannot be {size:,}")
        raw = bytearray(self._exactly(file, size, "header"))
        claimed = bytes(raw[_SEALED])
        raw[_SEALED] = _BLANK.encode()
        digest = sha256(raw)
        if not raw.startswith(_OPENING) or claimed != digest.hexdigest().encode():
            raise self._damage("header", self._foreign(raw) or "checksum differs")
        header: dict[str, Any] = json.loads(raw)
        if (other := self._foreign(raw)) is not None:
            raise self._damage("version", other)
        length = 8 + size + sum(e["data_offsets"][1] - e["data_offsets"][0] for n, e in header.items() if n[0] != "_")
        self._check_identity(header["__metadata__"], digest.digest(), length)
        return header

    @staticmethod
    def _foreign(raw: bytes | bytearray) -> str | None:
        """Describe the version of a header that can be parsed but has another version; otherwise None."""
        try:
            version = json.loads(raw)["__metadata__"].get("lightning_fed")
        except (ValueError, KeyError, TypeError, AttributeError):
            return None
        return None if version == str(VERSION) else f"format version {version}, this program reads {VERSION}"

    def _check_identity(self, metadata: Mapping[str, str], digest: bytes, length: int) -> None:
        where = self.location
        client, round = json.loads(metadata["client"]), json.loads(metadata["round"])
        if (client, round) != (where.client, where.round) or type(client) is not type(where.client):
            raise self._damage("identity", f"this is the record of {owner(client)}, round {round}")
        if digest != where.digest:
            raise self._damage("identity", "this is another record of the same client and round")
        if length != where.length:
            raise self._damage("length", f"{length:,} bytes, expected {where.length:,}")

    def _metadata(self, header: dict[str, Any]) -> dict[str, Any]:
        return {
            name: json.loads(text)
            for name, text in header.pop("__metadata__").items()
            if name not in ("sha256", "format", "lightning_fed")
        }

    def _tensor(self, file: BinaryIO, name: str, entry: Mapping[str, Any], metadata: Mapping[str, Any]) -> Tensor:
        dtype, shape = _DTYPES[entry["dtype"]], entry["shape"]
        if name in metadata["dtypes"]:
            text, shape = metadata["dtypes"][name]
            dtype = getattr(torch, text)
        tensor = torch.empty(shape, dtype=dtype)  # torch's own alignment, because the bits of kernels may depend on it
        view = _view(tensor)
        got = file.readinto(view) if len(view) else 0  # type: ignore[attr-defined]
        if got != len(view):
            raise self._damage(name, f"the file ends after {got:,} of {len(view):,} bytes")
        if sha256(view).hexdigest() != metadata["sums"][name]:
            raise self._damage(name, "checksum differs")
        return tensor

    def _exactly(self, file: BinaryIO, size: int, part: str) -> bytes:
        found = file.read(size)
        if len(found) != size:
            raise self._damage(part, f"the file ends after {len(found):,} of {size:,} bytes")
        return found

    def _damage(self, part: str, what: str) -> DamagedRecordError:
        where = self.location
        return DamagedRecordError(where.path, part, what, where.client, where.round)
