"""Frames: bytes of a header and raw tensors, whose declared sizes are checked before anything is allocated."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from torch import Tensor

MAGIC = b"LFframe1"
#: Most bytes of a header, and most tensors of a frame.
MOST_HEADER, MOST_TENSORS = 2**24, 100_000
_FIXED = len(MAGIC) + 4 + 32

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for dtype in (torch.float64, torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.int16)
} | {"int8": torch.int8, "uint8": torch.uint8, "bool": torch.bool, "complex64": torch.complex64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class FrameError(ValueError):
    """Bytes from the network are not the frame that was expected; the message says what differs.

    >>> Frame.open(b"GET / HTTP/1.1")
    Traceback (most recent call last):
    lightning_fed.deploy.frames.FrameError: 14 bytes are no frame: too short.
    """


@dataclass(frozen=True)
class Spec:
    """Type and shape of a tensor.

    >>> Spec.of(torch.zeros(2, 3))
    Spec(dtype='float32', shape=(2, 3))
    """

    dtype: str
    shape: tuple[int, ...]

    @classmethod
    def of(cls, tensor: Tensor) -> Spec:
        """The spec of a tensor; refuses types that are not sent."""
        if tensor.dtype not in _NAMES:
            raise TypeError(f"Tensors of {tensor.dtype} are not sent; use one of {', '.join(_DTYPES)}.")
        return cls(_NAMES[tensor.dtype], tuple(tensor.shape))

    @property
    def bytes(self) -> int:
        """Bytes of the tensor."""
        return math.prod(self.shape) * _DTYPES[self.dtype].itemsize


Schema = Mapping[str, Spec]


def schema_of(tensors: Mapping[str, Tensor]) -> dict[str, Spec]:
    """The specs of tensors by name.

    >>> schema_of({"x": torch.ones(1)})
    {'x': Spec(dtype='float32', shape=(1,))}
    """
    return {name: Spec.of(tensor) for name, tensor in tensors.items()}


def encode(header: Mapping[str, Any], tensors: Mapping[str, Tensor] | None = None) -> bytes:
    """Encode a header of plain values, and tensors.

    >>> frame = Frame.open(encode({"round": 3}, {"x": torch.arange(3)}))
    >>> frame.header, frame.tensors({"x": Spec("int64", (3,))})
    ({'round': 3}, {'x': tensor([0, 1, 2])})
    """
    tensors = tensors or {}
    declared = [[name, spec.dtype, list(spec.shape)] for name, spec in schema_of(tensors).items()]
    text = json.dumps({"header": dict(header), "tensors": declared}, separators=(",", ":")).encode()
    if len(text) > MOST_HEADER:
        raise ValueError(f"The header has {len(text):,} bytes; at most {MOST_HEADER:,} are sent.")
    body: list[Any] = [text, *(_bytes_of(tensor) for tensor in tensors.values())]
    digest = sha256()
    for part in body:
        digest.update(part)
    return b"".join([MAGIC, len(text).to_bytes(4, "little"), digest.digest(), *body])


def digest_of(data: bytes) -> str:
    """The checksum that a frame carries, by which a reply names the frame that it answers."""
    return data[len(MAGIC) + 4 : _FIXED].hex()


def _bytes_of(tensor: Tensor) -> memoryview:
    plain = tensor.detach().cpu().resolve_conj().resolve_neg().contiguous()
    flat: Any = plain.reshape(-1).view(torch.uint8).numpy() if plain.numel() else b""
    return memoryview(flat)


class Frame:
    """A frame whose header has been read, and whose tensors have not.

    ``schema`` holds what the sender declares. :meth:`tensors` compares it with what the receiver expects, and only
    then allocates. Nothing is unpickled.
    """

    def __init__(self, header: dict[str, Any], schema: dict[str, Spec], body: memoryview, digest: str) -> None:
        self.header, self.schema, self.digest = header, schema, digest
        self._body = body

    @classmethod
    def open(cls, data: bytes) -> Frame:
        """Read the header; refuse bytes that are no frame, are cut short or changed, or declare other sizes."""
        if len(data) < _FIXED:
            raise FrameError(f"{len(data)} bytes are no frame: too short.")
        if data[: len(MAGIC)] != MAGIC:
            raise FrameError("The bytes are no frame: they begin otherwise.")
        size = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 4], "little")
        view = memoryview(data)[_FIXED:]
        if size > min(MOST_HEADER, len(view)):
            raise FrameError(f"The frame declares a header of {size:,} bytes, and has {len(view):,} bytes in all.")
        if sha256(view).digest() != data[len(MAGIC) + 4 : _FIXED]:
            raise FrameError("The frame differs from its checksum.")
        try:
            content = json.loads(bytes(view[:size]))
            header, schema = content["header"], _declared(content["tensors"])
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise FrameError(f"The header cannot be read: {error}") from None
        if not isinstance(header, dict):
            raise FrameError("The header is no mapping.")
        body, declared = view[size:], sum(spec.bytes for spec in schema.values())
        if declared != len(body):
            raise FrameError(f"The frame declares {declared:,} bytes of tensors, and has {len(body):,}.")
        return cls(header, schema, body, digest_of(data))

    def tensors(self, expected: Schema) -> dict[str, Tensor]:
        """The tensors by name; refuses any other set of names, types and shapes than ``expected``."""
        if differing := first_difference(self.schema, expected):
            raise FrameError(differing)
        found, at = {}, 0
        for name, spec in self.schema.items():
            tensor = torch.empty(spec.shape, dtype=_DTYPES[spec.dtype])  # aligned as torch's own: bits may depend on it
            if spec.bytes:
                raw = self._body[at : at + spec.bytes]
                memoryview(tensor.view(-1).view(torch.uint8).numpy())[:] = raw  # type: ignore[arg-type]
            found[name] = tensor
            at += spec.bytes
        return found


def first_difference(declared: Schema, expected: Schema) -> str | None:
    """The first tensor that is declared otherwise than expected, in words; None if there is none.

    >>> first_difference({"x": Spec("float32", (3,))}, {"x": Spec("float32", (2,))})
    'Tensor x is declared as float32 (3,); expected is float32 (2,).'
    """
    for name in (*expected, *declared):
        if name not in declared:
            return f"Tensor {name} is missing."
        if name not in expected:
            return f"Tensor {name!r} is not expected."
        got, wanted = declared[name], expected[name]
        if got != wanted:
            return f"Tensor {name} is declared as {got.dtype} {got.shape}; expected is {wanted.dtype} {wanted.shape}."
    return None


def _declared(entries: Any) -> dict[str, Spec]:
    if not isinstance(entries, list) or len(entries) > MOST_TENSORS:
        raise FrameError(f"The frame must declare a list of at most {MOST_TENSORS:,} tensors.")
    schema: dict[str, Spec] = {}
    for name, dtype, shape in entries:
        whole = isinstance(shape, list) and all(type(n) is int and 0 <= n < 2**48 for n in shape) and len(shape) <= 16
        if not isinstance(name, str) or name in schema or dtype not in _DTYPES or not whole:
            raise FrameError(f"A tensor is declared as {str([name, dtype, shape])[:200]}.")
        schema[name] = Spec(dtype, tuple(shape))
    return schema
