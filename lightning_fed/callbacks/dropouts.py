from __future__ import annotations

from collections.abc import Mapping, Sequence

from lightning_fed.core.memory import ClientId
from lightning_fed.core.randomness import numpy_generator
from lightning_fed.core.validation import is_number, is_whole, whole
from lightning_fed.lightning import pl
from lightning_fed.trainer.hooks import FederatedCallback


class Dropouts(FederatedCallback):
    """Has clients drop out of rounds that they were drawn for, to study how robust a run is.

    A client that drops out is a client that failed: use ``FederatedServer(on_client_error="skip")``, whose other
    settings such as ``min_clients`` then apply. It is not trained, its state stays, and the round has the bits of one
    that never drew it. Whether it drops out is a function of (seed, round, client) alone, so that every engine, and a
    run that is resumed, have the same dropouts.

    Args:
        rate: chance to drop out of a round, one for all clients or one for each that may; 1 for clients that are gone.
        clients: the only ones that may drop out at a common ``rate``; everybody by default.
        first, last: the only rounds in which clients drop out at random, from 0.
        trace: clients that are away by round, as they were recorded elsewhere; beside those that are drawn.
        seed: of the draws; by default that of the server.

    >>> gone = Dropouts(rate=1.0, clients=["c3"], first=10)
    >>> gone.is_away(9, "c3", seed=0), gone.is_away(10, "c3", seed=0), gone.is_away(10, "c4", seed=0)
    (False, True, False)
    >>> Dropouts(trace={2: ["c1"]}).is_away(2, "c1", seed=0)
    True
    """

    reads_module = False

    def __init__(
        self,
        rate: float | Mapping[int | str, float] = 0.0,
        clients: Sequence[int | str] | None = None,
        first: int = 0,
        last: int | None = None,
        trace: Mapping[int, Sequence[int | str]] | None = None,
        seed: int | None = None,
    ) -> None:
        self.rate, self.clients, self.first, self.last, self.seed = rate, clients, first, last, seed
        self.trace = {} if trace is None else trace
        whole(self, "first", 0)
        whole(self, "last", first, optional=True)
        whole(self, "seed", 0, optional=True)
        if isinstance(rate, Mapping) and clients is not None:
            raise ValueError(
                "Dropouts.rate names clients already. Leave clients out, or give one rate for all of them."
            )
        for value in rate.values() if isinstance(rate, Mapping) else [rate]:
            if not is_number(value) or not 0 <= value <= 1:
                raise ValueError(f"Dropouts.rate must be a probability in [0, 1], got {value!r}.")
        for round in self.trace:
            if not is_whole(round) or round < 0:
                raise ValueError(f"Dropouts.trace must name rounds, whole numbers from 0, got {round!r}.")

    def drops(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, client: ClientId) -> bool:
        return self.is_away(round, client, trainer.fit_loop.server.seed)

    def is_away(self, round: int, client: ClientId, seed: int) -> bool:
        """Whether a client drops out of a round; ``seed`` counts where this object has none of its own."""
        if client in self.trace.get(round, ()):
            return True
        if round < self.first or (self.last is not None and round > self.last):
            return False
        rate = self.rate_of(client)
        seed = seed if self.seed is None else self.seed
        return rate > 0 and float(numpy_generator(seed, round, client, "dropout").random()) < rate

    def rate_of(self, client: ClientId) -> float:
        """A client's chance to drop out of a round."""
        if isinstance(self.rate, Mapping):
            return self.rate.get(client, 0.0)
        return self.rate if self.clients is None or client in self.clients else 0.0
