"""Read records in a background thread before they are needed."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor

from lightning_fed.store.records import Location, Record, read


class ReadAhead:
    """Reads records before they are needed, at most ``most`` bytes (and at least one record) at a time."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._thread = ThreadPoolExecutor(1, "store-read")
        self._waiting: deque[tuple[bytes, Location]] = deque()
        self._reading: dict[bytes, tuple[Location, Future[Record]]] = {}

    def ask(self, wanted: Iterable[tuple[bytes, Location]]) -> None:
        """Read these records next; drop records of an earlier call that were not taken."""
        self.forget()
        self._waiting.extend(wanted)
        self._go_on()

    def take(self, key: bytes, location: Location) -> Record | None:
        """Return the record at this location if it was read ahead or is being read; otherwise None."""
        found = self._reading.pop(key, None)
        if found is None:
            return None
        self._go_on()
        if found[0] != location:
            found[1].cancel()
            return None
        return found[1].result()

    def forget(self) -> None:
        """Drop waiting requests and records that were read."""
        self._waiting.clear()
        for _, future in self._reading.values():
            future.cancel()
        self._reading.clear()

    def quiesce(self) -> None:
        """Wait until no record is being read."""
        self._thread.submit(int).result()  # the one thread runs tasks in order, so all earlier ones are done

    def close(self) -> None:
        self.forget()
        self._thread.shutdown()

    def _go_on(self) -> None:
        held = sum(location.length for location, _ in self._reading.values())
        while self._waiting and (not self._reading or held + self._waiting[0][1].length <= self.most):
            key, location = self._waiting.popleft()
            self._reading[key] = location, self._thread.submit(read, location)
            held += location.length
