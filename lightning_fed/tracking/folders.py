"""Files beside a log."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from lightning_fed.lightning import Logger, WandbLogger


def folder_of(logger: Logger) -> Path | None:
    """The folder of a logger's run: its own, or the one in which Lightning keeps the checkpoints of the run.

    None for a logger that writes no local files, or none at present.
    """
    if isinstance(logger, WandbLogger) and logger.experiment.disabled:
        return None
    place: str | Path | None = logger.log_dir
    if not place and logger.save_dir and logger.name is not None and logger.version is not None:
        version = logger.version
        place = Path(logger.save_dir, str(logger.name), version if isinstance(version, str) else f"version_{version}")
    return None if not place or "://" in str(logger.save_dir) else Path(place)


def file_of(folder: Path, name: str, ending: str) -> Path:
    """A file for a logged name, such as ``clients/table``; makes the folder."""
    folder.mkdir(parents=True, exist_ok=True)
    return folder / f"{name.replace('/', '_')}.{ending}"


def append(path: Path, columns: list[str], rows: list[list[Any]], step: int) -> None:
    """Append the rows of a step to a CSV file, whose first column is the step.

    Rows of this step and of later ones are replaced: a run that was resumed comes to them again. If the file has other
    columns, the whole file is written again with those of both.
    """
    before: list[list[str]] = []
    if path.exists():
        with path.open(newline="", encoding="utf-8") as file:
            before = list(csv.reader(file))
    old, kept = (before[0] if before else []), [row for row in before[1:] if int(row[0]) < step]
    if old == columns and len(kept) == len(before) - 1:
        with path.open("a", newline="", encoding="utf-8") as file:
            csv.writer(file).writerows(rows)
        return
    with path.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys([*old, *columns])))
        writer.writeheader()
        writer.writerows(dict(zip(old, row, strict=True)) for row in kept)
        writer.writerows(dict(zip(columns, row, strict=True)) for row in rows)
