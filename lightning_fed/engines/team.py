"""Processes that share tasks, and send their answers through shared memory."""

from __future__ import annotations

import os
import signal
import sys
import warnings
from collections.abc import Callable, Sequence
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from typing import Any

import torch

from lightning_fed.engines.parcel import Parcel
from lightning_fed.engines.sequential import ClientError, DivergenceError


class Team:
    """Forked processes, the k-th of n with the tasks k, k + n, k + 2n, ...

    Args:
        task: gives what is kept of an answer, and the rest of it; each comes back in memory of its own.
    """

    def __init__(self, workers: int, tasks: int, task: Callable[[int], tuple[Any, Any]]) -> None:
        self.parcels = [(Parcel(), Parcel()) for _ in range(tasks)]
        self.lines: list[Connection] = []
        self.pids: list[int] = []
        sys.stdout.flush()  # or children would print it once more
        for k in range(workers):
            receiver, sender = Pipe(duplex=False)
            with warnings.catch_warnings():
                warnings.filterwarnings("ignore", "This process", DeprecationWarning)  # other threads are not needed
                pid = os.fork()
            if pid == 0:
                self._work(range(k, tasks, workers), task, sender)
            sender.close()
            self.lines.append(receiver)
            self.pids.append(pid)

    def _work(self, share: Sequence[int], task: Callable[[int], tuple[Any, Any]], line: Connection) -> None:
        """Everything a child does; it never returns."""
        code = 1
        try:
            signal.signal(signal.SIGINT, signal.SIG_IGN)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            torch.set_num_threads(1)
            for i in share:
                try:
                    contents = task(i)
                    labels = [parcel.fill(content) for parcel, content in zip(self.parcels[i], contents, strict=True)]
                    line.send((None, labels))
                except BaseException as error:
                    line.send(((isinstance(error, DivergenceError), type(error).__name__, str(error)), []))
                    break
            code = 0
        finally:
            sys.stdout.flush()
            os._exit(code)

    def receive(self, i: int, where: str) -> tuple[Any, Any]:
        try:
            failure, labels = self.lines[i % len(self.lines)].recv()
        except EOFError:
            raise ClientError(f"{where}: its process died, perhaps for lack of memory. Use fewer workers.") from None
        if failure is not None:
            diverged, kind, text = failure
            known = kind in (ClientError.__name__, DivergenceError.__name__)
            raise (DivergenceError if diverged else ClientError)(text if known else f"{where}: {kind}: {text}")
        state, answer = (parcel.open(label) for parcel, label in zip(self.parcels[i], labels, strict=True))
        return state, answer

    def dismiss(self) -> None:
        """End whoever is still at work."""
        for pid in self.pids:
            os.kill(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        for line in self.lines:
            line.close()
        for parcels in self.parcels:
            for parcel in parcels:
                parcel.close()
