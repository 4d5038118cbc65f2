"""Give memory back to the system."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

from torch import Tensor

#: Models with fewer bytes leave no gaps that matter.
LARGE = 2**20


def release_memory(x: Tensor) -> None:
    """Return what visits with vectors like ``x`` have freed, where the C library keeps it.

    What clients remember outlives the gradients and activations that are allocated beside it. The C library keeps the
    gaps that those leave, which grew by a vector and more for every client that was visited; a round later they would
    be of no use, because the next client's vectors lie elsewhere.
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
