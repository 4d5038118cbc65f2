"""The tables of docs/modules.md: ``python -m helpers.zoo.table`` in tests prints them."""

from __future__ import annotations

from helpers.zoo import CHAPTERS


def tables() -> str:
    """One for each chapter, under its heading."""
    parts = []
    for heading, entries in CHAPTERS.items():
        rows = [f"| {entry.name} | {entry.outcome} | {entry.how} |".replace("|  |", "| |") for entry in entries]
        parts.append("\n".join([f"## {heading}", "", "| idiom | | how |", "|---|---|---|", *rows]))
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    print(tables(), end="")
