"""End worker processes with the process that forked them, also when that process is killed."""

from __future__ import annotations

import ctypes
import os
import signal
import threading
import time
from collections.abc import Callable
from functools import cache
from typing import Any

_PR_SET_PDEATHSIG = 1  # of Linux, in <sys/prctl.h>
_SECONDS = 0.5  # between two looks at the parent, where the kernel does not tell of its death


def ender(signum: int = signal.SIGKILL) -> Callable[[], None]:
    """Call before a fork; the child calls the result, and from then on ends within a second of its parent's death.

    ``signum`` is the signal that ends it: one that a process which has children of its own can hand on.
    """
    parent, prctl = os.getpid(), _prctl()

    def end_with_parent() -> None:
        if prctl is None or prctl(_PR_SET_PDEATHSIG, signum, 0, 0, 0) != 0:
            threading.Thread(target=_watch, args=(parent,), daemon=True).start()
        if os.getppid() != parent:  # it died before this process asked to be told
            os._exit(1)

    return end_with_parent


def end_with(parent: int) -> None:
    """End this process within a second of the death of its parent, which another program has started it from."""
    threading.Thread(target=_watch, args=(parent,), daemon=True).start()


@cache
def _prctl() -> Any:
    # Looked up before the fork: another thread may hold the lock of the dynamic linker, which a child could never take.
    try:
        return ctypes.CDLL(None).prctl
    except (AttributeError, OSError, TypeError):  # not Linux
        return None


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(_SECONDS)
    os._exit(1)
