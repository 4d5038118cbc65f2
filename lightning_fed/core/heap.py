"""Return freed memory to the operating system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

#: Minimum size in bytes of a model whose visits leave gaps worth returning.
LARGE = 2**20


def release_memory(x: Tensor) -> None:
    """Return memory that visits with vectors like ``x`` have freed to the operating system; only with glibc.

    Client states outlive the gradients and activations that are allocated between them. glibc keeps the gaps that
    these leave, at least one vector for every visited client, and cannot reuse them a round later, because the next
    client's vectors lie elsewhere.
    """
    trim = _trim()
    if trim is not None and x.device.type == "cpu" and x.numel() * x.element_size() >= LARGE:
        trim(0)


@cache
def _trim() -> Any:
    try:
        return ctypes.CDLL(None).malloc_trim
    except (AttributeError, OSError, TypeError):  # not the GNU C library
        return None
