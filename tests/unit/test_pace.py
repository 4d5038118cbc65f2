"""Time left is told from the measured rounds of each setting that still has to run."""

from __future__ import annotations

from pathlib import Path

import pytest

from lightning_fed.algorithms import FedAvg
from lightning_fed.cli.experiments.drive import drive
from lightning_fed.cli.experiments.pace import Pace
from lightning_fed.cli.experiments.run import Recipe, Run
from lightning_fed.cli.experiments.settings import synthetic


@pytest.fixture
def runs(tmp_path: Path) -> list[Run]:
    return [Run(synthetic(s), "FedAvg", FedAvg(), k, tmp_path, Recipe(rounds=2)) for s in (0.0, 1.0) for k in (0, 1)]


def test_every_setting_is_measured_first_and_time_left_weighs_each_by_its_own_pace(runs: list[Run]) -> None:
    now = [0.0]
    pace = Pace(runs, clock=lambda: now[0])
    assert pace.order == [runs[0], runs[2], runs[1], runs[3]]
    pace.begin(runs[0])
    now[0] = 4.0
    pace.tick(2.0)
    pace.end()
    assert pace.left() == "> 00:04 left"  # the other setting is not measured yet
    pace.begin(runs[2])
    now[0] = 104.0
    pace.tick(1.0)
    assert pace.left() == "05:04 left"  # two rounds at 2 s and three at 100 s
    pace.end()
    assert pace.left() == "03:24 left"  # a run that ended early has no rounds left


def test_where_there_is_no_terminal_every_run_is_one_line(runs: list[Run], capsys: pytest.CaptureFixture[str]) -> None:
    drive(runs[:2])
    told = capsys.readouterr().err
    assert "\r" not in told
    assert [line.partition(":")[0] for line in told.splitlines() if "FedAvg" in line] == [
        "synthetic-(0,0) FedAvg seed 0",
        "synthetic-(0,0) FedAvg seed 1",
    ]
