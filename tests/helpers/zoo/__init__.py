"""Modules as people write them, each with what becomes of it in a federation; docs/modules.md is their table."""

from helpers.zoo.base import Entry
from helpers.zoo.clocks import CLOCKS
from helpers.zoo.public import PUBLIC
from helpers.zoo.state import STATE
from helpers.zoo.steps import STEPS

#: By the headings of docs/modules.md.
CHAPTERS: dict[str, list[Entry]] = {
    "Steps": STEPS,
    "State": STATE,
    "Time": CLOCKS,
    "Public modules": PUBLIC,
}

ZOO = [entry for entries in CHAPTERS.values() for entry in entries]
