"""Keys: name every instruction of a run, in the order in which the server gives them."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lightning_fed.core.records import record
from lightning_fed.deploy.frames import FrameError


class Key(NamedTuple):
    """Names an instruction, and the state of a client that following it made.

    Args:
        incarnation: how often the server has been started for this run; so a restarted server repeats no key.
        round: number of the round; -1 for a full start.
        exchange: number of the exchange in its round.
        attempt: how often the clients of this exchange have been asked before.

    Later keys are greater:

    >>> Key(1, 7, 0, 2) < Key(2, 6, 0, 0), str(Key(2, 6, 0, 0))
    (True, '2.6.0.0')
    """

    incarnation: int
    round: int
    exchange: int
    attempt: int

    def __str__(self) -> str:
        return ".".join(map(str, self))

    @classmethod
    def read(cls, value: Any) -> Key:
        """A key from a header."""
        if not isinstance(value, list) or len(value) != 4 or not all(type(n) is int and n >= -1 for n in value):
            raise FrameError(f"A key is four whole numbers; got {str(value)[:100]}.")
        return cls(*value)


NONE = Key(-1, -1, -1, -1)


@record
class Version:
    """All that the server keeps of a client's state: the key of the instruction that made it.

    The state itself stays on the client's node.

    >>> Version.of(Key(1, 7, 0, 2)).name
    Key(incarnation=1, round=7, exchange=0, attempt=2)
    """

    key: Tensor

    @classmethod
    def of(cls, key: Key) -> Version:
        return cls(torch.tensor(key, dtype=torch.int64))

    @property
    def name(self) -> Key:
        """The key."""
        return Key(*self.key.tolist())
