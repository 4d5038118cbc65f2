"""Clients that failed: told of, counted, and found to be gone for good."""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from typing import Any

from lightning_fed.core.failures import NOT_FINITE, TOO_FAR, Failure
from lightning_fed.core.federation import Federation
from lightning_fed.core.memory import ClientId
from lightning_fed.core.round import Outcome
from lightning_fed.engines.sequential import ClientError, DivergenceError

#: Failed visits, and none that succeeded, after which a client is taken for gone.
GONE = 3


class TooFewClientsError(ClientError):
    """A round has fewer replies than the policy wants, because of ``failures``; it was not committed."""

    def __init__(self, text: str, failures: Mapping[ClientId, Failure]) -> None:
        super().__init__(text)
        self.failures = dict(failures)


def is_divergence(error: BaseException) -> bool:
    """Whether a round failed because models left the finite numbers, or the distance that the policy believes.

    >>> is_divergence(TooFewClientsError("", {"a": Failure(NOT_FINITE, ""), "b": Failure(TOO_FAR, "")}))
    True
    >>> is_divergence(TooFewClientsError("", {"a": Failure(NOT_FINITE, ""), "b": Failure("dropped out", "")}))
    False
    """
    if isinstance(error, TooFewClientsError):
        return bool(error.failures) and all(f.kind in (NOT_FINITE, TOO_FAR) for f in error.failures.values())
    return isinstance(error, DivergenceError)


class FailedClients:
    """Tells of clients that fail, once per client and kind, and counts failures since a client's last success."""

    def __init__(self, federation: Federation) -> None:
        self.federation = federation
        self.in_a_row: dict[ClientId, int] = {}
        self._told: set[tuple[Any, ...]] = set()

    def tell(self, failures: Mapping[ClientId, Failure]) -> None:
        """Warn of what has not been told yet, unless it was asked for."""
        for cid, failure in failures.items():
            if not failure.injected:
                more = "Later failures of this client of the same kind are only counted, as federated/failed_clients."
                self._warn((cid, failure.kind), f"Left out: {failure.reason} {more}")

    def count(self, outcome: Outcome, failures: Mapping[ClientId, Failure]) -> None:
        """Take note of a committed round, with the failures of all its attempts."""
        for cid in outcome.states:
            self.in_a_row.pop(cid, None)
        for cid in failures.keys() - outcome.states.keys():
            self.in_a_row[cid] = self.in_a_row.get(cid, 0) + 1
            if self.in_a_row[cid] >= GONE:
                self._advise(cid)

    def _advise(self, cid: ClientId) -> None:
        federation, summary = self.federation, self.federation.store.summary(cid)
        never = summary is None or not summary.visits
        if never and federation.algorithm.share(federation.fresh()) is not None:
            self._warn(
                (cid, "gone"),
                f"Client {cid!r} failed in all of its {self.in_a_row[cid]} visits. Its share of what"
                f" {type(federation.algorithm).__name__}'s server remembers is still that of round 0 and pulls the"
                f" model there. If the client is gone, take its share out: FederatedServer.expel({cid!r}).",
            )

    def _warn(self, key: tuple[Any, ...], text: str) -> None:
        if key not in self._told:
            self._told.add(key)
            warnings.warn(text, stacklevel=4)
