"""Read a large JSON object member by member, with one member's text in memory at a time."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any, BinaryIO

import orjson

CHUNK = 1 << 20

_STRING = re.compile(rb'"[^"\\]*(?:\\.[^"\\]*)*"', re.DOTALL)  # not (?:[^"\\]|\\.)*, which steps by character
_MARK = re.compile(rb'["{}\[\]]')
_SCALAR = re.compile(rb"[^ \t\r\n,}\]]*")
_SPACE = re.compile(rb"[ \t\r\n]*")


class JsonError(ValueError):
    """Text that is not JSON, or ends too early."""


class JsonStream:
    """A cursor in a JSON text that is read from a file a little at a time.

    >>> import io
    >>> stream = JsonStream(io.BytesIO(b'{"a": [1, 2], "b": {"c": 3}}'))
    >>> [(key, stream.value()) for key in stream.members()]
    [('a', [1, 2]), ('b', {'c': 3})]
    """

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._text = b""
        self._at = 0

    def members(self) -> Iterator[str]:
        """Keys of the object that begins here; the caller takes each one's value, or walks its members, in turn."""
        self._expect(b"{")
        if self._peek() == b"}":
            self._at += 1
            return
        while True:
            key = self._key()
            self._expect(b":")
            yield key
            following = self._peek()
            self._at += 1
            if following == b"}":
                return
            if following != b",":
                raise JsonError(f"wanted ',' or '}}' after the value of {key!r}, got {_shown(following)}")

    def value(self) -> Any:
        """The value that begins here."""
        end = self._end_of_value()
        text = self._text[self._at : end]
        self._at = end
        return loads(text)

    def close(self) -> None:
        """Refuse text after the object, other than white space."""
        if rest := self._peek():
            raise JsonError(f"there is more after the end of the object: {_shown(rest)}")

    def _key(self) -> str:
        if self._peek() != b'"':
            raise JsonError(f"wanted a name in quotes, got {_shown(self._peek())}")
        end = self._end_of_string(self._at)
        key: str = loads(self._text[self._at : end])
        self._at = end
        return key

    def _peek(self) -> bytes:
        """The next character that is not space; empty at the end of the file."""
        while True:
            space = _SPACE.match(self._text, self._at)
            assert space is not None
            self._at = space.end()
            if self._at < len(self._text) or not self._more():
                return self._text[self._at : self._at + 1]

    def _expect(self, wanted: bytes) -> None:
        if self._peek() != wanted:
            raise JsonError(f"wanted {_shown(wanted)}, got {_shown(self._peek())}")
        self._at += 1

    def _more(self) -> bool:
        """Read more text, and drop the text before the cursor."""
        kept = self._text[self._at :]
        new = self._file.read(max(CHUNK, len(kept)))
        self._text, self._at = kept + new, 0
        return bool(new)

    def _end_of_value(self) -> int:
        first = self._peek()
        if first == b'"':
            return self._end_of_string(self._at)
        if first not in (b"{", b"["):
            return self._end_of_scalar()
        depth, offset = 0, 0  # offset from the cursor: it stays the same when more is read
        while True:
            mark = _MARK.search(self._text, self._at + offset)
            if mark is None:
                offset = len(self._text) - self._at
                self._need_more()
                continue
            found = mark.group()
            if found == b'"':
                offset = self._end_of_string(mark.start()) - self._at
                continue
            offset = mark.end() - self._at
            depth += 1 if found in b"{[" else -1
            if depth == 0:
                return mark.end()

    def _end_of_string(self, start: int) -> int:
        offset = start - self._at
        while (string := _STRING.match(self._text, self._at + offset)) is None:
            self._need_more()
        return string.end()

    def _end_of_scalar(self) -> int:
        while True:
            scalar = _SCALAR.match(self._text, self._at)
            assert scalar is not None
            if scalar.end() < len(self._text) or not self._more():
                if scalar.end() == scalar.start():
                    raise JsonError(f"wanted a value, got {_shown(self._peek())}")
                return self._at + len(scalar.group())

    def _need_more(self) -> None:
        if not self._more():
            raise JsonError("the file ends too early")


def loads(text: bytes) -> Any:
    """Parse with orjson; if that fails, with Python's parser, which knows NaN and gives better errors."""
    try:
        return orjson.loads(text)
    except orjson.JSONDecodeError:
        try:
            return json.loads(text.decode())  # of bytes it would guess the encoding
        except ValueError as error:
            raise JsonError(f"it is not JSON: {error}") from error


def _shown(text: bytes) -> str:
    return repr(text.decode("latin1")) if text else "the end of the file"
