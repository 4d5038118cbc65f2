"""docs/modules.md says of every entry of the zoo what the tests show, and of nothing else."""

from __future__ import annotations

import re
from pathlib import Path

from helpers.zoo import ZOO
from helpers.zoo.table import tables

PAGE = Path(__file__).parents[2] / "docs" / "modules.md"


def rows() -> list[str]:
    cells = [re.match(r"\| (.*?) \|", line) for line in PAGE.read_text().splitlines()]
    return [cell[1] for cell in cells if cell is not None and cell[1] != "idiom"]


def test_every_row_names_an_entry_and_every_entry_has_a_row() -> None:
    names = [entry.name for entry in ZOO]
    assert len(set(names)) == len(names)
    assert rows() == names


def test_the_page_says_what_the_tests_show() -> None:
    text = PAGE.read_text()
    assert text[text.index("## ") :] == tables(), "write the tables anew: (cd tests && python -m helpers.zoo.table)"
