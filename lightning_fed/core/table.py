"""Results as rows: a list of dicts that also becomes a DataFrame or a CSV file."""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pandas

Row = dict[str, Any]


class Table(list[Row]):
    """A list of rows, each a dict from column to value. A row may lack columns that others have.

    >>> table = Table([{"client": "ann", "loss": 0.5}, {"client": "bob"}])
    >>> table.columns
    ['client', 'loss']
    >>> table.column("client")
    ['ann', 'bob']
    """

    def __init__(self, rows: Iterable[Mapping[str, Any]] = ()) -> None:
        super().__init__(dict(row) for row in rows)

    @property
    def columns(self) -> list[str]:
        """Names of all columns, in the order in which rows first have them."""
        return list(dict.fromkeys(name for row in self for name in row))

    def column(self, name: str) -> list[Any]:
        """Values of the rows that have this column."""
        if self and name not in (known := self.columns):
            raise KeyError(f"There is no column {name!r}; there are {', '.join(known)}.")
        return [row[name] for row in self if name in row]

    def cells(self) -> list[list[Any]]:
        """The rows as lists in the order of ``columns``; None where a row has no value, or nan.

        >>> Table([{"client": "ann", "loss": math.nan}, {"client": "bob", "loss": 1.0}]).cells()
        [['ann', None], ['bob', 1.0]]
        """
        columns = self.columns
        return [[_known(row.get(name)) for name in columns] for row in self]

    def to_pandas(self) -> pandas.DataFrame:
        """The table as a DataFrame; a missing value is NaN. Needs pandas."""
        try:
            import pandas
        except ImportError:
            raise ImportError(
                "Table.to_pandas needs pandas, which is not installed: pip install pandas. Without it, a table is a"
                " list of dicts, and to_csv writes it to a file."
            ) from None
        return pandas.DataFrame(list(self), columns=self.columns)

    def to_csv(self, path: str | Path) -> None:
        """Write a CSV file with a header; a missing value and nan are empty cells."""
        path = Path(path)
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8", errors="backslashreplace") as file:
            writer = csv.writer(file)
            writer.writerow(self.columns)
            writer.writerows(self.cells())


def _known(value: Any) -> Any:
    return None if isinstance(value, float) and math.isnan(value) else value
