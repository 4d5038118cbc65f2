"""Results of evaluating a model on clients' data."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from lightning_fed.core.memory import ClientId


@dataclass
class Evaluation:
    """A model on one client's data: mean loss, accuracy (nan if the module reports none), number of samples."""

    loss: float = math.nan
    accuracy: float = math.nan
    examples: int = 0


@dataclass
class ClientEvaluations:
    """Evaluations by client of one split."""

    by_client: dict[ClientId, Evaluation] = field(default_factory=dict)

    def mean(self, what: str) -> float:
        """Sample-weighted mean over the clients that report it."""
        known = [(getattr(e, what), e.examples) for e in self.by_client.values() if not math.isnan(getattr(e, what))]
        total = sum(examples for _, examples in known)
        return sum(value * examples for value, examples in known) / total if total else math.nan
