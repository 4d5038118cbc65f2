"""Clients that leave a federation or join it between two rounds or two runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from lightning_fed.core.federation import Federation
from lightning_fed.core.memory import ClientId


class Turnover:
    """Clients that are to leave or to join, as soon as there is a federation.

    Args:
        check: refuses a number of clients.
    """

    def __init__(self, check: Callable[[int], None]) -> None:
        self.check = check
        self.leaving: list[ClientId] = []
        self.joining: list[ClientId] = []

    def staying(self, examples: Mapping[ClientId, int]) -> dict[ClientId, int]:
        """The clients that begin a federation."""
        self.joining.clear()
        return {cid: count for cid, count in examples.items() if cid not in self.leaving}

    def apply(self, federation: Federation, examples: Mapping[ClientId, int]) -> bool:
        """Have clients leave and join, and say whether any did; ``examples`` counts the samples that the data have."""
        joining = [cid for cid in self.joining if cid in examples]
        leaving = [cid for cid in self.leaving if cid in federation.weights]
        if joining or leaving:
            self.check(len(federation.weights) + len(joining) - len(leaving))
        for cid in joining:
            federation.admit(cid, examples[cid])
        for cid in leaving:
            federation.expel(cid)
        self.joining.clear()
        self.leaving.clear()
        return bool(joining or leaving)

    def load(self, federation: Federation, saved: Mapping[str, Any]) -> None:
        """Load ``saved`` with the population of that time; :meth:`apply` then has clients leave and join."""
        federation.follow_population(saved, self.leaving, self.joining)
        federation.load_state_dict(saved)
