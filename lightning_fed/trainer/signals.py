"""End a fit where SIGTERM finds it."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_fed.lightning import SIGTERMException, owns_sigterm, pl

#: The exit code of a process that SIGTERM has ended.
STATUS = 128 + signal.SIGTERM


@contextmanager
def ended_by_sigterm(trainer: pl.Trainer) -> Iterator[None]:
    """Have SIGTERM raise in the block, as Ctrl-C does, after Lightning has noted it.

    Lightning looks at its note once per batch, and a batch is a round here; compiling and evaluating may take minutes.
    A handler of the user's own, and that of a scheduler which queues the run again, decide for themselves. Several
    processes end by the note, between two steps, because one that raised would leave the others waiting.
    """
    check_sigterm(trainer)  # noted in the sanity check
    if threading.current_thread() is not threading.main_thread() or trainer.world_size > 1 or not owns_sigterm(trainer):
        yield
        return
    note: Any = signal.getsignal(signal.SIGTERM)
    pid = os.getpid()

    def end(signum: int, frame: FrameType | None) -> None:
        if os.getpid() != pid:  # a forked worker of a loader, which has inherited this handler
            os._exit(STATUS)
        signal.signal(signal.SIGTERM, note)  # `timeout` sends two, and the second must not disturb the end
        note(signum, frame)
        raise SIGTERMException(STATUS)

    signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        if signal.getsignal(signal.SIGTERM) is end:
            signal.signal(signal.SIGTERM, note)


def check_sigterm(trainer: pl.Trainer) -> None:
    """End a fit that Lightning would call finished, because SIGTERM came after its last batch."""
    if trainer.received_sigterm:
        raise SIGTERMException(STATUS)
