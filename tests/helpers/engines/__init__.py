"""The rows of the matrix engine x module; WAYS has its columns."""

from helpers.engines.base import STACKED, WAYS, Row, Run, run
from helpers.engines.large import LARGE
from helpers.engines.losses import LOSSES
from helpers.engines.refused import REFUSED
from helpers.engines.settings import SETTINGS

ROWS = [*SETTINGS, *LOSSES, *LARGE, *REFUSED]


def row_named(name: str) -> Row:
    (found,) = [row for row in ROWS if row.name == name]
    return found


__all__ = ["REFUSED", "ROWS", "STACKED", "WAYS", "Row", "Run", "row_named", "run"]
