"""Tables of an evaluation: a row by client, and a row by metric."""

from __future__ import annotations

import math
from collections.abc import Mapping

from lightning_fed.core.labels import label_of
from lightning_fed.core.table import Table
from lightning_fed.evaluation.client_rows import CLIENT
from lightning_fed.evaluation.results import Spread
from lightning_fed.lightning import pl
from lightning_fed.tracking.tables import log_table


def log_clients(trainer: pl.Trainer, rows: Table, round: int) -> None:
    """Log ``clients/table``, the rows of ``server.clients``, and a histogram of every column over clients."""
    labelled = Table({**row, CLIENT: label_of(row[CLIENT])} for row in rows)
    known = {name: [float(v) for v in rows.column(name) if math.isfinite(v)] for name in rows.columns[2:]}
    histograms = {f"clients/{name}": values for name, values in known.items() if values}
    log_table(trainer.loggers, "clients/table", labelled.columns, labelled.cells(), round, histograms)


def log_spreads(trainer: pl.Trainer, spreads: Mapping[str, Spread], round: int) -> None:
    """Log ``clients/spread``: by metric its mean and spread over clients, and which client is the worst."""
    columns = ["metric", "mean", "sd", "worst_decile", "worst", "worst_client"]
    rows = [
        [name, s.mean, s.sd, s.worst_decile, s.worst, None if s.client is None else label_of(s.client)]
        for name, s in spreads.items()
        if not math.isnan(s.mean)
    ]
    log_table(trainer.loggers, "clients/spread", columns, rows, round)
