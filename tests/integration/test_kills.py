"""Fits that are killed, at every durability point, at random times and by signals, go on bitwise from ``last.ckpt``.

LIGHTNING_FED_SOAK=1 (``make soak``) runs all points and many random kills.
"""

from __future__ import annotations

import os
import random
import shutil
import signal
import tempfile
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.kills import STATEFUL, At, Noted, Run, differences

from lightning_fed.store import files, verify, verify_snapshot

SOAK = bool(os.environ.get("LIGHTNING_FED_SOAK"))
SHARED = Path("/dev/shm")


@pytest.fixture
def ram(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory where the system has one, because syncs to a disk take most of the time."""
    if not os.access(SHARED, os.W_OK):
        yield tmp_path
        return
    folder = Path(tempfile.mkdtemp(prefix="lightning_fed_", dir=SHARED))
    yield folder
    shutil.rmtree(folder)


#: Keep one checkpoint, which every round replaces: there is no other one to fall back to.
ALONE = {"filename": "last", "save_last": False}


@cache
def reference(name: str, store: str = "disk", alone: bool = False) -> tuple[dict[str, Any], list[str]]:
    """What an uninterrupted run remembers at the end, and the durability points that it passes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", STATEFUL[name], store, save=ALONE if alone else {})
        assert run.play(Noted(Path(folder) / "points")) == 0
        return run.final, (Path(folder) / "points").read_text().splitlines()


def check_last(run: Run) -> None:
    """Whatever ended the run, its last checkpoint and the records of that are whole."""
    path = run.root / "saved" / "last.ckpt"
    if path.exists():
        verify(path)
        records = torch.load(path, weights_only=True).get("client_records")
        if records is not None:
            assert verify_snapshot(path.parent / records["folder"]) == []


def check_resumed(run: Run, name: str) -> None:
    """The resumed run has ended as the uninterrupted one, repeated one round at most and left no garbage."""
    assert differences(run.final, reference(name)[0]) == []
    assert run.repeated <= 1
    saved = run.root / "saved"
    assert list(saved.glob(".*.part")) == []
    for folder in saved.glob("*.records-*"):
        assert (saved / folder.name.partition(".records-")[0]).exists(), f"{folder.name} belongs to no checkpoint"


def check_ended_at(run: Run, name: str, at: int, sign: int, status: int) -> None:
    """A run that gets a signal at a durability point ends soon with ``status``, and goes on bitwise."""
    began = time.monotonic()
    assert run.play(At(at, sign)) == status
    assert time.monotonic() - began < 10
    check_last(run)
    assert run.play() == 0
    check_resumed(run, name)
    shutil.rmtree(run.root)


# -- at durability points ------------------------------------------------------------------------------------------


def _points() -> list[tuple[str, str, int, int]]:
    """The algorithm, the store, the first point, and the distance between points; in a soak all points of FedADMM."""
    first = {name: 31 * i for i, name in enumerate(STATEFUL)}  # others for every algorithm
    if not SOAK:
        return [(name, "disk", 1 + first[name] % 131, 131) for name in STATEFUL] + [("Scaffold", "memory", 9, 31)]
    every = [("FedADMM", "disk", i, 6) for i in range(1, 7)]
    every += [(name, "disk", 1 + first[name] % 14, 14) for name in STATEFUL if name != "FedADMM"]
    return every + [(name, "memory", 1 + first[name] % 8, 8) for name in STATEFUL]


@pytest.mark.parametrize(("name", "store", "first", "apart"), _points())
def test_a_fit_killed_at_a_durability_point_goes_on_bitwise(
    name: str, store: str, first: int, apart: int, ram: Path, record_property: Any
) -> None:
    points = len(reference(name, store)[1])
    assert points > 40
    chosen = range(first, points + 1, apart)
    for at in chosen:
        run = Run(ram / str(at), STATEFUL[name], store)
        check_ended_at(run, name, at, signal.SIGKILL, -signal.SIGKILL)
    record_property("points", len(chosen))


@pytest.mark.parametrize("store", ["memory", "disk"])
def test_a_kill_during_a_save_leaves_the_previous_last_checkpoint(store: str, ram: Path) -> None:
    """In each round two files are saved, last.ckpt second: the fourth is that of round 1."""
    saved = [i for i, name in enumerate(reference("FedADMM", store)[1], start=1) if name == "checkpoint: saved"]
    run = Run(ram / "run", store=store)
    assert run.play(At(saved[3])) == -signal.SIGKILL
    check_last(run)
    assert torch.load(run.root / "saved" / "last.ckpt", weights_only=True)["global_step"] == 1
    assert (run.root / "saved" / ".last.ckpt.part").exists()
    assert run.play() == 0
    check_resumed(run, "FedADMM")


@pytest.mark.parametrize("store", ["memory", "disk"] if SOAK else ["disk"])
def test_there_is_a_last_link_at_any_moment(store: str, ram: Path, record_property: Any) -> None:
    """With save_last="link", a checkpoint that is replaced is the one that ``last`` points to."""
    link = {"save_last": "link"}
    assert Run(ram / "noted", store=store, save=link).play(Noted(ram / "points")) == 0
    points = (ram / "points").read_text().splitlines()
    about = ["symbolic link: made", "symbolic link: renamed"]  # to the new file; it is removed; Lightning links again
    chosen = [i for i, name in enumerate(points, start=1) if name in (*about, "checkpoint: removed")]
    assert [points[i - 1] for i in chosen] == about + 2 * [*about, "checkpoint: removed", *about]
    for at in chosen if SOAK else chosen[2:7]:
        run = Run(ram / str(at), store=store, save=link)
        check_ended_at(run, "FedADMM", at, signal.SIGKILL, -signal.SIGKILL)
    record_property("points", len(chosen))


def test_large_records_are_written_by_a_thread(
    ram: Path, monkeypatch: pytest.MonkeyPatch, record_property: Any
) -> None:
    monkeypatch.setattr(files, "LARGE", 1)
    chosen = range(20, 180, 7 if SOAK else 80)
    for at in chosen:
        check_ended_at(Run(ram / str(at)), "FedADMM", at, signal.SIGKILL, -signal.SIGKILL)
    record_property("points", len(chosen))


def test_the_store_does_not_change_the_result() -> None:
    for name in STATEFUL if SOAK else ["FedADMM"]:
        assert differences(reference(name, "memory")[0], reference(name, "disk")[0]) == []


# -- signals that Python sees --------------------------------------------------------------------------------------


def _during_saves(points: list[str]) -> list[int]:
    """Points of the second save, of its rename in any case, or of all three."""
    renamed = [i for i, name in enumerate(points, start=1) if name == "write: renamed" and "sealed" in points[i - 4]]
    if not SOAK:
        return [renamed[1] - 4, renamed[1]]
    return sorted({*renamed, *range(25, renamed[-1], 9)})


@pytest.mark.parametrize("alone", [True, False], ids=["one checkpoint", "two checkpoints"])
@pytest.mark.parametrize(("sign", "status"), [("SIGINT", 1), ("SIGTERM", 128 + signal.SIGTERM)])
def test_a_fit_ended_by_a_signal_goes_on_bitwise(
    sign: str, status: int, alone: bool, ram: Path, record_property: Any
) -> None:
    chosen = _during_saves(reference("FedADMM", "disk", alone)[1])
    for at in chosen:
        run = Run(ram / str(at), save=ALONE if alone else {})
        check_ended_at(run, "FedADMM", at, getattr(signal, sign), status)
    record_property("signals", len(chosen))


# -- kills at random times -----------------------------------------------------------------------------------------

PLACES = ["TMPDIR beside", "TMPDIR elsewhere", "records elsewhere"]
KILLS = 18 if SOAK else 2


class Told:
    """Writes one byte to a pipe at every durability point."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def __call__(self, name: str) -> None:
        os.write(self.pipe, b".")


def place(where: str, root: Path, ram: Path) -> tuple[Run, Path]:
    """A run on disk, and the folder for its temporary files."""
    beside = root / "tmp"
    beside.mkdir(parents=True)
    settings = {"store_dir": ram / "records"} if where == "records elsewhere" else {}
    return Run(root, settings=settings), ram if where == "TMPDIR elsewhere" else beside


def killed(run: Run, temporary: Path, draw: random.Random, aimed: bool) -> bool:
    """Start a run and kill it at a random time, or soon after a random durability point; False if it ends before."""
    reading, writing = os.pipe()
    pid = run.start(Told(writing), temporary)
    os.close(writing)
    if aimed:
        wanted = draw.randrange(1, 180)
        while wanted and (got := os.read(reading, wanted)):
            wanted -= len(got)
        time.sleep(draw.uniform(0, 0.004))
    else:
        time.sleep(draw.uniform(0, 1.0))
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    return run.wait(pid) != 0


@pytest.mark.parametrize("aimed", [False, True], ids=["any time", "at saves"])
@pytest.mark.parametrize("where", PLACES)
def test_a_fit_killed_at_random_goes_on_bitwise(
    where: str, aimed: bool, tmp_path: Path, ram: Path, record_property: Any
) -> None:
    draw, left, number = random.Random(f"{where}{aimed}"), KILLS, 0
    while left > 0:
        number += 1
        run, temporary = place(where, tmp_path / str(number), ram)
        for _ in range(3):  # a resumed run may be killed again
            if not killed(run, temporary, draw, aimed):
                break
            left -= 1
            check_last(run)
        assert run.play() == 0
        check_resumed(run, "FedADMM")
    record_property("kills", KILLS - left)
