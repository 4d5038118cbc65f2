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

from lightning_fed.store import durable, files, verify, verify_snapshot

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


@cache
def reference(name: str, store: str = "disk") -> tuple[dict[str, Any], list[str]]:
    """What an uninterrupted run remembers at the end, and the durability points that it passes."""
    with tempfile.TemporaryDirectory() as folder:
        run = Run(Path(folder) / "run", STATEFUL[name], store)
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


def check_signal(run: Run, name: str, at: int, sign: int, expected: set[int]) -> None:
    began = time.monotonic()
    assert run.play(At(at, sign)) in expected
    assert time.monotonic() - began < 10
    check_last(run)
    assert run.play() == 0
    check_resumed(run, name)
    shutil.rmtree(run.root)


# -- at durability points ------------------------------------------------------------------------------------------

#: The algorithm, the store and the distance between points; the first point is another for every algorithm.
POINTS = [(name, store, (1 if name == "FedADMM" else 7) if SOAK else 61) for name in STATEFUL for store in ("disk",)]
POINTS += [(name, "memory", 5 if SOAK else 41) for name in STATEFUL]


@pytest.mark.parametrize(("name", "store", "apart"), POINTS)
def test_a_fit_killed_at_a_durability_point_goes_on_bitwise(name: str, store: str, apart: int, ram: Path) -> None:
    points = len(reference(name, store)[1])
    assert points > 40
    first = 1 + (5 * list(STATEFUL).index(name)) % apart
    for at in range(first, points + 1, apart):
        run = Run(ram / str(at), STATEFUL[name], store)
        check_signal(run, name, at, signal.SIGKILL, {-signal.SIGKILL})


@pytest.mark.parametrize("apart", [1 if SOAK else 67])
def test_large_records_written_by_a_thread(apart: int, ram: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(files, "LARGE", 1)
    for at in range(20, 180, apart):
        run = Run(ram / str(at))
        check_signal(run, "FedADMM", at, signal.SIGKILL, {-signal.SIGKILL})


def test_the_store_does_not_change_the_result() -> None:
    for name in STATEFUL if SOAK else ["FedADMM"]:
        assert differences(reference(name, "memory")[0], reference(name, "disk")[0]) == []


# -- signals that Python sees --------------------------------------------------------------------------------------


@pytest.mark.parametrize("keep", [0, 1])
@pytest.mark.parametrize(("sign", "status"), [(signal.SIGINT, 1), (signal.SIGTERM, 128 + signal.SIGTERM)])
def test_a_fit_ended_by_a_signal_goes_on_bitwise(sign: int, status: int, keep: int, ram: Path) -> None:
    """With ``save_top_k=0`` last.ckpt is the only checkpoint, so that there is none to fall back to."""
    for at in _signalled():
        run = Run(ram / str(at), save={"save_top_k": keep})
        check_signal(run, "FedADMM", at, sign, {status})


def _signalled() -> list[int]:
    return list(range(30, 100, 1 if SOAK else 23))


# -- kills at random times -----------------------------------------------------------------------------------------

PLACES = ["TMPDIR beside", "TMPDIR elsewhere", "records elsewhere"]
KILLS = 25 if SOAK else 3


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
        time.sleep(draw.uniform(0, 1.5))
    os.kill(pid, signal.SIGKILL)
    os.close(reading)
    return run.wait(pid) != 0


@pytest.mark.parametrize("aimed", [False, True], ids=["any time", "at saves"])
@pytest.mark.parametrize("where", PLACES)
def test_a_fit_killed_at_random_goes_on_bitwise(where: str, aimed: bool, tmp_path: Path, ram: Path) -> None:
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


def test_points_are_those_of_the_package() -> None:
    assert {"checkpoint: sealed", "index: committed", "write: renamed", "link: made"} <= set(reference("FedADMM")[1])
    assert durable.point("nothing") is None  # type: ignore[func-returns-value]
