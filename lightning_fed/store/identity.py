"""Client ids as keys of the index and as parts of file names."""

from __future__ import annotations

import operator
from hashlib import sha256

from lightning_fed.core.memory import ClientId

SERVER = b"server"  # the key of the server's own record; clients' keys begin with i or s and a colon


def key_of(cid: ClientId) -> bytes:
    """The exact id, tagged with its type, as bytes.

    >>> key_of(1), key_of("1"), key_of("../x")
    (b'i:1', b's:1', b's:../x')
    """
    if isinstance(cid, str):
        return b"s:" + cid.encode("utf-8", "surrogatepass")
    return b"i:%x" % operator.index(cid)


def cid_of(key: bytes) -> ClientId:
    """Return the client id of a key.

    >>> [cid_of(key_of(cid)) for cid in (-17, "../x", "")]
    [-17, '../x', '']
    """
    tag, text = key[:2], key[2:]
    if tag == b"i:":
        return int(text, 16)
    if tag == b"s:":
        return text.decode("utf-8", "surrogatepass")
    raise ValueError(f"{key!r} is not the key of a client.")


def name_of(key: bytes) -> str:
    """A file name for a key: hexadecimal digits, so that no id leaves the folder and case does not matter.

    >>> name_of(key_of("../x"))
    '0c47f7d1eeac1346969476ae67b62176'
    """
    return sha256(key).hexdigest()[:32]
