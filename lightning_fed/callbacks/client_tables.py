"""Tables of an evaluation: a row by client, and a row by metric."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from lightning_fed.core.labels import label_of
from lightning_fed.core.memory import ClientId, Cost, Summary
from lightning_fed.evaluation.results import ClientEvaluations, Spread
from lightning_fed.lightning import pl
from lightning_fed.tracking.wandb import log_table

if TYPE_CHECKING:
    from lightning_fed.core.federation import Federation


def log_clients(
    trainer: pl.Trainer,
    federation: Federation,
    splits: Mapping[str, ClientEvaluations],
    own: ClientEvaluations,
    round: int,
) -> None:
    """Log ``clients/table``, with every metric of the server's model by split and of each client's ``own`` model."""
    data: Any = trainer.datamodule
    measured = _columns(splits, own)
    columns = ["client", "examples", "visits", *measured, "bytes_down", "bytes_up", "local_steps"]
    rows, nothing = [], Summary(0, Cost())
    for cid in federation.client_ids:
        summary = federation.store.summary(cid) or nothing
        facts = [label_of(cid), data.num_examples(cid), summary.visits]
        values = [column.get(cid, math.nan) for column in measured.values()]
        rows.append([*facts, *values, summary.cost.bytes_down, summary.cost.bytes_up, summary.cost.steps])
    columns_of_numbers = list(zip(columns, zip(*rows, strict=True), strict=True))[2:]
    known = {name: [float(v) for v in values if math.isfinite(v)] for name, values in columns_of_numbers}
    histograms = {f"clients/{name}": values for name, values in known.items() if values}
    log_table(trainer.loggers, "clients/table", columns, rows, round, histograms)


def _columns(splits: Mapping[str, ClientEvaluations], own: ClientEvaluations) -> dict[str, dict[ClientId, float]]:
    """Every metric by client; ``own`` has those of held-out data, blank if no client has a model of its own."""
    found = {f"{split}_{metric}": e.values(metric) for split, e in splits.items() for metric in e.metrics}
    metrics = dict.fromkeys([*list(splits.values())[-1].metrics, *own.metrics])
    return {**found, **{f"own_{metric}": own.values(metric) for metric in metrics}}


def log_spreads(trainer: pl.Trainer, spreads: Mapping[str, Spread], round: int) -> None:
    """Log ``clients/spread``: by metric its mean and spread over clients, and which client is the worst."""
    columns = ["metric", "mean", "sd", "worst_decile", "worst", "worst_client"]
    rows = [
        [name, s.mean, s.sd, s.worst_decile, s.worst, None if s.client is None else label_of(s.client)]
        for name, s in spreads.items()
        if not math.isnan(s.mean)
    ]
    log_table(trainer.loggers, "clients/spread", columns, rows, round)
