"""Modules as people write them, each with what becomes of it in a federation; docs/modules.md is their table."""

from zoo.base import Entry
from zoo.clocks import CLOCKS
from zoo.public import PUBLIC
from zoo.state import STATE
from zoo.steps import STEPS

#: By the headings of docs/modules.md.
CHAPTERS: dict[str, list[Entry]] = {
    "Steps": STEPS,
    "State": STATE,
    "Time": CLOCKS,
    "Public modules": PUBLIC,
}

ZOO = [entry for entries in CHAPTERS.values() for entry in entries]
