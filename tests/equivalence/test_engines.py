"""The matrix engine x module: every way to train ends where Lightning's own loop ends, one client after another.

Rows are in helpers/engines: modules, data and settings; columns are the ways to train them. The module zoo has the
same matrix for modules as people write them (test_module_zoo.py).
"""

from __future__ import annotations

import re

import pytest
import torch
from helpers.c_steps import needs_compiler
from helpers.engines import REFUSED, ROWS, STACKED, Row, Run, run

#: Of a row that is not slow itself; `make quick` runs no others.
QUICK = ("lean", "recorded")


def marks(row: Row, way: str) -> list[pytest.MarkDecorator]:
    slow = [] if way in QUICK and not row.slow else [pytest.mark.slow]
    return [*slow, *([needs_compiler] if way == "in C" else [])]


MATRIX = [
    pytest.param(row, way, id=f"{row.name}-{way}", marks=marks(row, way))
    for row in ROWS
    for way in row.ways
    if row.alone is None or way not in STACKED
]


def name_of(row: Row) -> str:
    return row.name


def assert_same(row: Row, found: Run, expected: Run) -> None:
    assert found.memory.keys() == expected.memory.keys()
    pairs = {name: (found.memory[name].double(), value.double()) for name, value in expected.memory.items()}
    unlike = [name for name, pair in pairs.items() if not torch.allclose(*pair, rtol=0, atol=row.tolerance)]
    assert not unlike
    assert len(found.logged) == len(expected.logged)
    for ours, theirs in zip(found.logged, expected.logged, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)


def assert_warned(row: Row, way: str, found: Run) -> None:
    awaited = row.warns.get(way, row.warns.get("all"))
    strange = [text for text in found.warned if awaited is None or not re.search(awaited, text)]
    assert strange == []
    assert awaited is None or found.warned


@pytest.mark.parametrize(("row", "way"), MATRIX)
def test_every_way_to_train_ends_where_lightnings_own_loop_ends(row: Row, way: str) -> None:
    expected, found = run(row, "lightning"), run(row, way)
    assert all(row.logs <= logged.keys() for logged in expected.logged)
    assert_same(row, found, expected)
    assert_warned(row, way, found)
    if way == "in C" and row.in_c is not None:
        assert bool(found.calls) == row.in_c


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_what_cannot_be_stacked_is_refused_by_name(row: Row) -> None:
    with pytest.raises(ValueError, match=f'engine="vectorized" is impossible here: .*{row.alone}'):
        run(row, "recorded")


@pytest.mark.parametrize("row", REFUSED, ids=name_of)
def test_what_cannot_be_stacked_is_trained_one_by_one_by_default(row: Row) -> None:
    found, expected = run(row, "auto"), run(row, "lean")
    assert sum(bool(re.search(f"Clients are trained one by one.*{row.alone}", text)) for text in found.told) == 1
    assert found.memory.keys() == expected.memory.keys()
    assert [name for name, value in expected.memory.items() if not torch.equal(found.memory[name], value)] == []
    assert_warned(row, "auto", found)
