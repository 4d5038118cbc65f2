"""End a command at once when Ctrl-C or SIGTERM comes, with the usual exit code, and say how to resume it."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

from lightning_fed.lightning import ModelCheckpoint, pl

#: Seconds in which a repeated SIGTERM is ignored: `timeout` sends two, and the command is about to save and end.
PATIENCE = 10.0


class Stopped(SystemExit):
    """A signal has ended the command: the exit code is 128 and the signal's number."""

    def __init__(self, signum: int) -> None:
        super().__init__(128 + signum)


class _Handler:
    """Handler of Ctrl-C and SIGTERM: raises wherever the process is, and notes the signal.

    During a fit Lightning calls it after its own handler of SIGTERM, which only sets a flag. A flag set after the last
    batch is forgotten, so that the next fit of the command would begin. Python drops an exception that is raised in a
    finaliser, such as one that the garbage collector runs; :func:`check_interrupted` raises it again.
    """

    def __init__(self) -> None:
        self.pid, self.last = os.getpid(), -PATIENCE
        self.noted: int | None = None

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        if os.getpid() != self.pid:  # a forked worker, which has inherited this handler
            os._exit(128 + signum)
        before, self.last = self.last, time.monotonic()
        if signum == signal.SIGINT or self.last - before >= PATIENCE:
            self.noted = signum
            self.check()

    def check(self) -> None:
        if self.noted is not None:
            raise KeyboardInterrupt if self.noted == signal.SIGINT else Stopped(self.noted)


_handlers: list[_Handler] = []


@contextmanager
def terminable() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end the block at once, and restore the former handlers afterwards."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    handler = _Handler()
    # SIGINT stays ignored where it is, as in what a shell runs in the background
    signals = [signal.SIGTERM, *([signal.SIGINT] if callable(signal.getsignal(signal.SIGINT)) else [])]
    before = {signum: signal.signal(signum, handler) for signum in signals}
    _handlers.append(handler)
    try:
        yield
    finally:
        _handlers.remove(handler)
        for signum, former in before.items():
            signal.signal(signum, former)


def check_interrupted() -> None:
    """Between two fits of a command: end it if a signal came whose exception was dropped."""
    if _handlers:
        _handlers[-1].check()


@contextmanager
def resumable(how: Callable[[], str] = lambda: "Repeat the command to resume.") -> Iterator[None]:
    """When a signal ends the block, say ``how`` to resume, once, and exit with 130 (Ctrl-C) or 143 (SIGTERM)."""
    try:
        yield
    except (KeyboardInterrupt, SystemExit) as error:
        signum = _signal_of(error)
        if signum is None or getattr(error, "told", False):
            raise
        print(f"\nInterrupted. {how()}".rstrip(), file=sys.stderr)
        stopped: Any = Stopped(signum)
        stopped.told = True
        raise stopped from None


def _signal_of(error: KeyboardInterrupt | SystemExit) -> int | None:
    """The signal that has caused an exception; None for an exit of another cause, such as a wrong argument."""
    if (
        isinstance(error, SystemExit) and error.code == 128 + signal.SIGTERM
    ):  # ours, or the server's for a flag of Lightning
        return signal.SIGTERM
    # Lightning answers a KeyboardInterrupt by sys.exit(1)
    pressed = isinstance(error, KeyboardInterrupt) or isinstance(error.__context__, KeyboardInterrupt)
    return signal.SIGINT if pressed else None


def resume_from(trainer: pl.Trainer | None) -> str:
    """How to go on with a fit, by its newest checkpoint."""
    kept = [] if trainer is None else [c for c in trainer.checkpoint_callbacks if isinstance(c, ModelCheckpoint)]
    paths = [path for c in kept for path in (c.last_model_path, c.best_model_path) if path and os.path.exists(path)]
    if not paths:
        return "No checkpoint was saved yet: repeat the command to start again."
    return f"Repeat the command with --ckpt_path={os.path.relpath(max(paths, key=os.path.getmtime))} to resume."
