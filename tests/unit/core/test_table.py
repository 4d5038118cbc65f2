"""A table is a list of dicts that becomes a DataFrame or a file."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest

from lightning_fed.core.table import Table

ROWS = [{"client": "ann", "loss": 0.5}, {"client": "bob, jr", "loss": math.nan, "visits": 3}]


def test_a_table_is_a_list_of_dicts_with_the_columns_of_all_rows() -> None:
    table = Table(ROWS)
    assert isinstance(table, list)
    assert table[0] == ROWS[0]
    assert table.columns == ["client", "loss", "visits"]
    assert table.column("visits") == [3]
    assert table.cells() == [["ann", 0.5, None], ["bob, jr", None, 3]]


def test_a_table_copies_its_rows() -> None:
    rows = [{"a": 1}]
    Table(rows)[0]["a"] = 2
    assert rows == [{"a": 1}]


def test_an_unknown_column_is_refused_with_those_that_are_there() -> None:
    with pytest.raises(KeyError, match=r"no column 'los'; there are client, loss, visits"):
        Table(ROWS).column("los")
    assert Table().column("loss") == []


def test_a_csv_file_has_a_header_and_empty_cells(tmp_path: Path) -> None:
    Table(ROWS).to_csv(tmp_path / "new" / "rows.csv")
    lines = (tmp_path / "new" / "rows.csv").read_text().splitlines()
    assert lines == ["client,loss,visits", "ann,0.5,", '"bob, jr",,3']


def test_without_pandas_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pandas", None)
    with pytest.raises(ImportError, match=r"needs pandas.*pip install pandas"):
        Table(ROWS).to_pandas()


def test_a_data_frame_has_the_rows_in_order() -> None:
    pandas = pytest.importorskip("pandas")
    frame = Table(ROWS).to_pandas()
    assert isinstance(frame, pandas.DataFrame)
    assert list(frame.columns) == ["client", "loss", "visits"]
    assert list(frame["client"]) == ["ann", "bob, jr"]
    assert frame["loss"].isna().tolist() == [False, True]
