"""The processes that share the rounds of a fit, and what they tell each other between visits."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from threading import Thread
from typing import Any, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.lightning import pl
from lightning_fed.trainer.parcels import empty_buffers, pack, unpack

T = TypeVar("T")
#: Time that processes have at least to start and to meet, however short they wait for each other later.
MEETING = timedelta(minutes=5)
#: Bytes of all ranks' parcels up to which they travel in one collective, padded to the longest of them.
SMALL = 2**20
#: Bytes from which the buffer of a tensor travels by itself.
LARGE = 2**16


@dataclass(frozen=True)
class _Unsendable:
    """Sent in the place of something that cannot be sent."""

    reason: str


class RankError(RuntimeError):
    """Another process of the run has died, or has not answered in time; the message names it and the round."""


class Ranks:
    """One process of several that run the same fit; each call is made by all of them, in the same order.

    The group is not torch's default one: whatever a module, a metric or a logger would gather over processes stays
    within its process, so that no collective happens inside a visit.

    Args:
        group: of gloo, over copies in memory; None for a single process.
        rank: number of this process.
        size: number of processes.
        timeout: longest time to wait for another process.

    >>> Ranks().gather("alone"), Ranks().broadcast("alone")
    (['alone'], 'alone')
    """

    def __init__(self, group: Any = None, rank: int = 0, size: int = 1, timeout: timedelta = timedelta(0)) -> None:
        self._group, self.rank, self.size, self.timeout = group, rank, size, timeout
        self.doing = "before round 0"  # for messages
        self.sent = 0  # bytes that this process has sent

    @classmethod
    def meet(cls, store: Any, rank: int, size: int, timeout: timedelta) -> Ranks:
        """Wait for the other processes, which meet in the same ``store``."""
        from torch.distributed import ProcessGroupGloo

        return cls(ProcessGroupGloo(store, rank, size, max(timeout, MEETING)), rank, size, timeout)

    @property
    def is_first(self) -> bool:
        """Whether this process writes files and logs."""
        return self.rank == 0

    def share(self, things: Sequence[T]) -> list[T]:
        """Those of some equally long tasks that this process does."""
        return list(things[self.rank :: self.size])

    # -- objects ------------------------------------------------------------------------------------------------

    def gather(self, thing: T) -> list[T]:
        """What every process has given, in the order of ranks; what this one gave is returned as it is."""
        if self.size == 1:
            return [thing]
        try:
            parcel = pack(thing)
        except Exception as error:  # pickling may fail in any way; the others must hear of it
            said = f"{type(error).__name__}: {error}"
            thing, parcel = _Unsendable(said), pack(_Unsendable(said))  # type: ignore[assignment]
        self.barrier()
        sizes = [len(buffer) for buffer in parcel.buffers]
        head = pickle.dumps((parcel.stream, sizes))
        lengths = self._gather_numbers([len(head), sum(sizes)])
        heads = self._spread(head, [int(n) for n, _ in lengths])
        found = []
        for source, ((_, rest), other) in enumerate(zip(lengths, heads, strict=True)):
            own = source == self.rank
            stream, others = pickle.loads(other)
            buffers = parcel.buffers if own else empty_buffers(others)
            if int(rest):
                self._spread_buffers([np.asarray(buffer) for buffer in buffers], source)
            found.append(thing if own else unpack(stream, list(buffers)))
        for rank, each in enumerate(found):
            if isinstance(each, _Unsendable):
                raise ValueError(
                    f"{self.doing}: rank {rank} of {self.size} has something that cannot be sent to the other processes"
                    f" ({each.reason}). Use devices=1, or do not leave it in an attribute, a metric or a state."
                )
        return found

    def broadcast(self, thing: T, source: int = 0) -> T:
        """What one process has."""
        return self.gather(thing if self.rank == source else None)[source]  # type: ignore[return-value]

    def together(self, work: Callable[[], T]) -> list[T]:
        """What ``work`` gives in every process; where it fails in one, the first such error is raised in all."""
        if self.size == 1:
            return [work()]
        try:
            result: tuple[T | None, Exception | None] = work(), None
        except Exception as error:  # whatever it is, the others must not wait for this process
            result = None, _sendable(error)
            first = next(e for _, e in self.gather(result) if e is not None)
            raise first if first is not result[1] else error from None
        found = self.gather(result)
        for _, other in found:
            if other is not None:
                raise other
        return [value for value, _ in found]  # type: ignore[misc]

    def merged(self, work: Callable[[], Mapping[Any, T]], order: Sequence[Any]) -> dict[Any, T]:
        """The entries that ``work`` gives in all processes, in this order."""
        parts = {key: value for part in self.together(work) for key, value in part.items()}
        return {key: parts[key] for key in order if key in parts}

    def check_same(self, facts: Mapping[str, Any]) -> None:
        """Refuse a run whose processes do not agree."""
        for rank, others in enumerate(self.gather(dict(facts))):
            for name, value in facts.items():
                if others[name] != value:
                    mine, theirs = _short(value), _short(others[name])
                    raise ValueError(
                        f"Rank {self.rank} has {name} {mine}, rank {rank} has {theirs}. All processes of a run build"
                        " the same federation: seed whatever deals the data, and read settings that all of them have."
                    )

    # -- tensors ------------------------------------------------------------------------------------------------

    def send(self, tensor: Tensor, to: int) -> None:
        """Send a tensor to one other process."""
        self.sent += tensor.nbytes
        self._wait(lambda: self._group.send([tensor.contiguous()], to, 0), f"rank {to}")

    def receive(self, like: Tensor, source: int) -> Tensor:
        """A tensor of this shape and precision from another process."""
        found = torch.empty_like(like)
        self._wait(lambda: self._group.recv([found], source, 0), f"rank {source}")
        return found

    def spread(self, tensor: Tensor, source: int) -> Tensor:
        """Make a tensor in all processes that of one of them, in place."""
        if self.size > 1:
            self._broadcast(tensor, source)
        return tensor

    def barrier(self) -> None:
        """Wait for all processes, and find out which one does not come.

        In a thread, so that this one hears of signals meanwhile: most waiting is here. Not torch's monitored barrier,
        in which the others wait for a first process that hangs as long as for a meeting.
        """
        errors: list[Exception] = []

        def wait() -> None:
            try:
                self._wait_for_all()
            except Exception as error:  # raised below
                errors.append(error)

        if self.size > 1:
            thread = Thread(target=wait, daemon=True)
            thread.start()
            thread.join()
        if errors:
            raise errors[0]

    def _wait_for_all(self) -> None:
        here = torch.zeros(1)
        if not self.is_first:
            self.send(here, 0)
            self.receive(here, 0)
            return
        for other in range(1, self.size):
            self.receive(here, other)
        for other in range(1, self.size):
            self.send(here, other)

    def _broadcast(self, tensor: Tensor, source: int) -> None:
        self.sent += tensor.nbytes * (source == self.rank)
        self._wait(lambda: self._group.broadcast(tensor, source), f"rank {source}")

    def _gather_numbers(self, numbers: list[int]) -> list[Tensor]:
        own = torch.tensor(numbers)
        found = [torch.empty_like(own) for _ in range(self.size)]
        self._wait(lambda: self._group.allgather([found], [own]))
        return found

    def _spread(self, own: bytes, lengths: list[int]) -> list[bytes]:
        longest = max(lengths)
        if longest * self.size <= SMALL:
            padded = torch.zeros(longest, dtype=torch.uint8)
            padded[: len(own)] = torch.frombuffer(bytearray(own), dtype=torch.uint8)
            found = [torch.empty_like(padded) for _ in lengths]
            self.sent += longest
            self._wait(lambda: self._group.allgather([found], [padded]))
            return [bytes(row[:n].numpy()) for row, n in zip(found, lengths, strict=True)]
        heads = []
        for source, length in enumerate(lengths):
            head = torch.frombuffer(bytearray(own if source == self.rank else length), dtype=torch.uint8)
            self._broadcast(head, source)
            heads.append(bytes(head.numpy()))
        return heads

    def _spread_buffers(self, buffers: list[NDArray[np.uint8]], source: int) -> None:
        """Fill buffers with those of one process: large ones one by one, the others together, which takes a copy."""
        small = [buffer for buffer in buffers if len(buffer) < LARGE]
        whole = np.concatenate(small) if small else np.empty(0, np.uint8)
        if len(whole):
            self._broadcast(torch.from_numpy(whole), source)
        if source != self.rank:
            for buffer, part in zip(small, np.split(whole, np.cumsum([len(b) for b in small])), strict=False):
                buffer[:] = part
        for buffer in buffers:
            if len(buffer) >= LARGE:
                self._broadcast(torch.from_numpy(buffer if buffer.flags.writeable else buffer.copy()), source)

    def _wait(self, call: Callable[[], Any], whom: str = "another rank") -> None:
        """Wait for a collective; name the process that is missing, if that is known, and the round."""
        try:
            call().wait(self.timeout)
        except RuntimeError as error:
            said = str(error)
            raise RankError(
                f"{self.doing}: rank {self.rank} of {self.size} got no answer from {whom}, which has died or has"
                f" not come within {self.timeout}. The round is not committed: start the run again with"
                ' ckpt_path="last" (torchrun --max-restarts=3 does so by itself). If visits take longer than that, use'
                f" FederatedStrategy(timeout=...). ({said.splitlines()[0][:200]})"
            ) from error


#: A single process.
ALONE = Ranks()


def ranks_of(trainer: pl.Trainer) -> Ranks:
    """The processes that share this trainer's fit; a single one unless the strategy starts several."""
    found: Ranks | None = getattr(trainer.strategy, "ranks", None)
    return ALONE if found is None else found


def _sendable(error: Exception) -> Exception:
    try:
        copy: Exception = unpack(*_copied(error))
        return copy
    except Exception:  # an error of a user's class may refuse pickling in any way
        return RuntimeError(f"{type(error).__name__}: {error}")


def _copied(error: Exception) -> tuple[bytes, list[Any]]:
    parcel = pack(error)
    return parcel.stream, [bytearray(buffer) for buffer in parcel.buffers]


def _short(value: Any) -> str:
    text = repr(value)
    return text if len(text) < 80 else f"{text[:80]}..."
