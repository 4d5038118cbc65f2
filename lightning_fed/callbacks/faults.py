from __future__ import annotations

from collections.abc import Mapping, Sequence
from math import nan

from lightning_fed.core.failures import DROPPED, NOT_FINITE, TOO_FAR, TOO_SLOW, Fault, FaultKind
from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import is_number, is_whole, shown, whole
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import FederatedCallback


class Faults(FederatedCallback):
    """Has clients fail in rounds that they were drawn for, to study how robust a run is.

    What becomes of the round is up to ``FederatedServer(on_client_error=...)``. Whether a client fails is a function of
    (seed, round, client) alone: every engine, every retry, and a run that is resumed, have the same faults. Add several
    of these callbacks for several kinds of faults.

    Args:
        kind: of the failure, as in docs/failures.md. A client that ``dropped out`` is not visited. The others are
            visited; then their training ``raised`` an error, their model is ``not finite`` or ``too far`` from the
            server's, or the visit was ``too slow`` (seconds are added to its time; nobody waits).
        rate: chance to fail in a round, one for all clients or one for each that may; 1 for clients that always do.
        clients: the only ones that may fail at a common ``rate``; everybody by default.
        first, last: the only rounds in which clients fail at random, from 0; -1 is a full start.
        trace: clients that fail by round, as they were recorded elsewhere; beside those that are drawn.
        seed: of the draws; by default that of the server.
        size: the value of every parameter that is not finite (nan by default, or inf), the distance from the server's
            model, or the seconds that a visit counts as longer; by default twice what the policy allows.

    >>> gone = Faults(rate=1.0, clients=["c3"], first=10)
    >>> gone.fails(9, "c3", seed=0), gone.fails(10, "c3", seed=0), gone.fails(10, "c4", seed=0)
    (False, True, False)
    >>> Faults("raised", trace={2: ["c1"]}).fails(2, "c1", seed=0)
    True
    """

    reads_module = False

    def __init__(
        self,
        kind: FaultKind = "dropped out",
        rate: float | Mapping[int | str, float] = 0.0,
        clients: Sequence[int | str] | None = None,
        first: int = 0,
        last: int | None = None,
        trace: Mapping[int, Sequence[int | str]] | None = None,
        seed: int | None = None,
        size: float | None = None,
    ) -> None:
        self.kind, self.rate, self.clients, self.size = kind, rate, clients, size
        self.first, self.last, self.seed = first, last, seed
        self.trace = {} if trace is None else trace
        self._check()

    def _check(self) -> None:
        whole(self, "first", -1)
        whole(self, "last", self.first, optional=True)
        whole(self, "seed", 0, optional=True)
        if isinstance(self.clients, str):
            raise ValueError(f"Faults.clients must be a list of clients, such as [{self.clients!r}], got text.")
        if isinstance(self.rate, Mapping) and self.clients is not None:
            raise ValueError("Faults.rate names clients already. Leave clients out, or give one rate for all of them.")
        for value in self.rate.values() if isinstance(self.rate, Mapping) else [self.rate]:
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"Faults.rate must be a probability in [0, 1], got {shown(value)}.")
        for round in self.trace:
            if not is_whole(round) or round < -1:
                raise ValueError(f"Faults.trace must name rounds, whole numbers from -1, got {round!r}.")
        if self.size is not None or self.kind not in (TOO_FAR, TOO_SLOW):
            self._of_size(self.size)

    def on_fit_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if hasattr(trainer.fit_loop, "server"):  # a Trainer without one has no clients that could fail
            self._fault(trainer)

    def fault(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, client: ClientId) -> Fault | None:
        return self._fault(trainer) if self.fails(round, client, trainer.fit_loop.server.seed) else None

    def fails(self, round: int, client: ClientId, seed: int) -> bool:
        """Whether a client fails in a round; ``seed`` counts where this object has none of its own."""
        if client in self.trace.get(round, ()):
            return True
        if round < self.first or (self.last is not None and round > self.last):
            return False
        rate = self.rate_of(client)
        seed = seed if self.seed is None else self.seed
        purpose = "dropout" if self.kind == DROPPED else self.kind  # draws of each kind of their own
        return rate > 0 and float(numpy_generator(seed, round, client, purpose).random()) < rate

    def rate_of(self, client: ClientId) -> float:
        """A client's chance to fail in a round."""
        if isinstance(self.rate, Mapping):
            return self.rate.get(client, 0.0)
        return self.rate if self.clients is None or client in self.clients else 0.0

    def _fault(self, trainer: pl.Trainer) -> Fault:
        """The fault, in the size that the server's policy finds out where none is given."""
        policy = trainer.fit_loop.server.on_client_error
        name = {TOO_FAR: "max_distance", TOO_SLOW: "max_seconds"}.get(self.kind)
        limit = None if name is None else getattr(policy, name)
        if name is not None and limit is None and (self.size is None or self.kind == TOO_SLOW):
            raise ValueError(
                f'Faults("{self.kind}") needs a limit that the client exceeds. Use'
                f' FederatedServer(on_client_error=FailurePolicy("skip", {name}=...)).'
            )
        return self._of_size(2 * limit if self.size is None and limit is not None else self.size)

    def _of_size(self, size: float | None) -> Fault:
        return Fault(self.kind, nan if size is None and self.kind == NOT_FINITE else size)
