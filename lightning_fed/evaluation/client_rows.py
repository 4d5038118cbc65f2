"""One row per client: what ``server.clients`` holds and what trackers get as a table."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from lightning_fed.core.memory import ClientId, Cost, Summary
from lightning_fed.core.table import Table
from lightning_fed.evaluation.results import ClientEvaluations

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation

#: Columns that are no measurements of a model.
CLIENT, SAMPLES, VISITS = "client", "samples", "visits"


@dataclass(frozen=True, eq=False)
class Measured:
    """The server's model by split; clients' own models on the last of these splits, if they were measured."""

    splits: Mapping[str, ClientEvaluations] = field(default_factory=dict)
    own: ClientEvaluations | None = None

    def columns(self) -> dict[str, dict[ClientId, float]]:
        """Every metric by client, by names such as ``test_loss`` and ``own_loss``."""
        found = {f"{split}_{metric}": e.values(metric) for split, e in self.splits.items() for metric in e.metrics}
        if self.own is None:
            return found
        metrics = dict.fromkeys([*list(self.splits.values())[-1].metrics, *self.own.metrics])
        return {**found, **{f"own_{metric}": self.own.values(metric) for metric in metrics}}


def client_rows(data: Any, federation: Federation | None, measured: Measured) -> Table:
    """Rows of all clients: id, training samples, visits, metrics, bytes received and sent, local steps.

    Columns such as ``train_loss`` and ``test_accuracy`` are of the server's model, by split; ``own_loss``,
    ``own_accuracy`` and so on of the client's own model on the last of the splits. A metric that a client does not
    have is nan. Without a ``federation``, rows have no visits, bytes and steps.
    """
    columns, training = measured.columns(), data.client_ids  # of the data of a test, not always those of the fit
    held_out = [cid for found in measured.splits.values() for cid in found.by_client]  # some have no training data
    left = () if federation is None else federation.expelled
    ids = dict.fromkeys(cid for cid in [*training, *held_out] if cid not in left)
    known = {*training}
    return Table(_row(federation, cid, data.num_examples(cid) if cid in known else 0, columns) for cid in ids)


def _row(
    federation: Federation | None, cid: ClientId, samples: int, columns: Mapping[str, Mapping[ClientId, float]]
) -> dict[str, Any]:
    metrics = {name: values.get(cid, math.nan) for name, values in columns.items()}
    if federation is None:
        return {CLIENT: cid, SAMPLES: samples, **metrics}
    visits, cost, *_ = federation.store.summary(cid) or Summary(0, Cost())
    spent = {"bytes_down": cost.bytes_down, "bytes_up": cost.bytes_up, "local_steps": cost.steps}
    return {CLIENT: cid, SAMPLES: samples, VISITS: visits, **metrics, **spent}
