"""Client ids as text, for logs, tables, figures and the terminal."""

from __future__ import annotations

import re
from hashlib import sha256

from lightning_fed.core.memory import ClientId

#: Longest id that is written out, in characters; of a longer one the beginning is.
LONGEST = 64


def label_of(cid: ClientId) -> str:
    r"""A text of printable characters for a client id; unlike ids have unlike labels.

    Words are written as they are. Quotes mark strings that could be taken for a number, and strings with characters
    that cannot be printed or encoded.

    >>> [label_of(cid) for cid in (1, "ann", "../x", "Zoë")]
    ['1', 'ann', '../x', 'Zoë']
    >>> print(*map(label_of, ("1", "a\0b", "\udc80", " ")))
    '1' 'a\x00b' '\udc80' ' '
    >>> label_of("ab" * 5000)
    "'abababababababab'... (10000 characters, sha256 c3c1078e374cc3b1)"
    """
    if not isinstance(cid, str):
        return str(cid)
    if len(cid) > LONGEST:
        digest = sha256(cid.encode("utf-8", "surrogatepass")).hexdigest()[:16]
        return f"{cid[:16]!r}... ({len(cid)} characters, sha256 {digest})"
    like_a_number = re.fullmatch(r"[+-]?[0-9]+", cid)
    plain = cid.isprintable() and cid.strip() == cid and cid and cid[0] not in "'\"" and not like_a_number
    return cid if plain else repr(cid)
