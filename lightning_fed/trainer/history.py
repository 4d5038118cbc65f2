"""Every metric of every round, as the module and all callbacks logged them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from lightning_fed.core.table import Table


class History:
    """Metrics by round. A round's metrics are added in parts, because checkpoints are written before it ends."""

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        self._rows: dict[int, dict[str, float]] = {int(row["round"]): dict(row) for row in rows}

    def add(self, round: int, metrics: Mapping[str, Any]) -> None:
        """Add metrics to a round, in the place of those of the same names; omits what is no single number."""
        row = self._rows.setdefault(round, {"round": round})
        for name, value in metrics.items():
            if getattr(value, "numel", lambda: 1)() == 1:
                row[name] = float(value)

    @property
    def table(self) -> Table:
        """One row per round; a copy."""
        return Table(self._rows[round] for round in sorted(self._rows))
