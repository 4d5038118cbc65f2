"""The journal of a tune: a folder in which every trial has its settings, and a file for each rung it has done.

A file is complete or absent, so that a tune that was killed at any moment goes on from what the folder holds.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

from lightning_fed.cli.tuning.config import flat
from lightning_fed.cli.tuning.space import Value
from lightning_fed.store import durable

State = Literal["reached", "ended", "diverged", "failed"]


@dataclass(frozen=True)
class Leg:
    """A trial's way to a rung.

    Args:
        state: ``reached`` the rung; ``ended`` before it, by early stopping or the trainer's limits; ``diverged``;
            ``failed`` because its settings were refused.
        rounds: number of rounds the trial has done.
        sent: bytes that its clients have received and sent.
        value: the objective, if it is known.
        why: reason, for trials that diverged or failed.
        curve: (rounds, bytes, objective) of all evaluated rounds since round 0.
    """

    state: State
    rounds: int = 0
    sent: int = 0
    value: float | None = None
    why: str = ""
    curve: tuple[tuple[int, int, float], ...] = ()


@dataclass
class Trial:
    """Settings by config key, and the legs so far; leg k ends at rung k."""

    number: int
    settings: dict[str, Value]
    legs: list[Leg] = field(default_factory=list)

    @property
    def last(self) -> Leg:
        return self.legs[-1]

    @property
    def alive(self) -> bool:
        """Whether the trial may go on to the next rung."""
        return bool(self.legs) and self.last.state in ("reached", "ended") and self.last.value is not None


class Journal:
    """Reads and writes the folder of a tune."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def begin(self, facts: dict[str, Any]) -> None:
        """Write what the tune is, or refuse a folder that holds another one."""
        path = self.folder / "tune.json"
        wanted = json.loads(json.dumps(facts, default=str))
        if path.exists():
            _check_same(flat(json.loads(path.read_text())), flat(wanted), self.folder)
        else:
            _write(path, wanted)

    def folder_of(self, number: int) -> Path:
        return self.folder / "trials" / f"{number:04d}"

    def checkpoint_of(self, number: int) -> Path:
        """The checkpoint of a trial, alone in its folder with the memories of its clients."""
        return self.folder_of(number) / "checkpoint" / "last.ckpt"

    def read(self, number: int) -> Trial | None:
        """A trial with its legs, if it has begun."""
        folder = self.folder_of(number)
        if not (folder / "settings.json").exists():
            return None
        trial = Trial(number, json.loads((folder / "settings.json").read_text()))
        while (path := folder / f"rung_{len(trial.legs)}.json").exists():
            content = json.loads(path.read_text())
            curve = tuple((int(rounds), int(sent), value) for rounds, sent, value in content.pop("curve"))
            trial.legs.append(Leg(**content, curve=curve))
        return trial

    def start(self, number: int, settings: dict[str, Value]) -> Trial:
        durable.make_folder(self.folder_of(number))
        _write(self.folder_of(number) / "settings.json", settings)
        return Trial(number, settings)

    def add(self, trial: Trial, leg: Leg) -> None:
        _write(self.folder_of(trial.number) / f"rung_{len(trial.legs)}.json", asdict(leg))
        trial.legs.append(leg)

    def forget_checkpoint(self, trial: Trial) -> None:
        """Remove the checkpoint of a trial that does not go on."""
        durable.remove_folder(self.checkpoint_of(trial.number).parent)


def _write(path: Path, content: Any) -> None:
    durable.write(path, [json.dumps(content, indent=1).encode()])


def _check_same(before: dict[str, Any], now: dict[str, Any], folder: Path) -> None:
    for name in [*now, *(name for name in before if name not in now)]:
        old, new = before.get(name, "absent"), now.get(name, "absent")
        if old != new:
            raise ValueError(
                f"{folder} holds a tune with {name} {old!r}, now it is {new!r}. Give another --out, or delete that"
                " folder."
            )
