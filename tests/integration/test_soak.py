"""The scenarios of ``benchmarks/memory.py`` within their bounds: hours of rounds, behind ``make soak``."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "memory.py"

pytestmark = pytest.mark.skipif(not os.environ.get("LIGHTNING_FED_SOAK"), reason="takes minutes; make soak")


def figures(scenario: str, folder: Path) -> dict[str, Any]:
    """The summary of a scenario, which runs in a process of its own, because memory is measured."""
    out = folder / "figures.json"
    command = [sys.executable, str(SCRIPT), scenario, "--dir", str(folder), "--out", str(out), "--every", "100"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-2000:]
    found: dict[str, Any] = json.loads(out.read_text())
    print(json.dumps(found))
    return found


@pytest.mark.parametrize("scenario", ["cnn", "perceptron"])
def test_femnist_at_its_real_size_stays_small(scenario: str, tmp_path: Path) -> None:
    if scenario == "cnn" and shutil.disk_usage(tmp_path).free < 45e9:
        pytest.skip("needs 45 GB of disk")
    found = figures(scenario, tmp_path)
    assert found["peak_rss"] < 3000
    assert found["growth_from_round_20"] < {"cnn": 150, "perceptron": 400}[scenario]  # a cache of 256 MB fills
    # small states share segments, of which those less than half alive are compacted: 2 / 0.72 models on average
    assert found["models_per_client"] < {"cnn": 2.1, "perceptron": 3.0}[scenario]
    assert found["save_cpu_last"] < 2 * found["save_cpu_first"] + 0.1  # a checkpoint costs what a round has changed


def test_ten_thousand_rounds_leave_nothing_behind(tmp_path: Path) -> None:
    found = figures("long", tmp_path)
    assert found["growth_by_1000"] < 1.0
    assert found["descriptors"][1] <= found["descriptors"][0]


@pytest.mark.parametrize("scenario", ["many", "visited"])
def test_rounds_do_not_get_slower_with_the_clients_visited(scenario: str, tmp_path: Path) -> None:
    found = figures(scenario, tmp_path)
    assert found["visited"] > {"many": 3_500, "visited": 50_000}[scenario]
    assert max(found["start"][1], found["start_again"][1]) < 5  # of CPU time
    assert found["cpu_last"] < 1.2 * found["cpu_first"] + 0.002
    assert found["descriptors"][1] <= found["descriptors"][0]
    assert found["growth_from_round_20"] < {"many": 300, "visited": 600}[scenario]  # a cache of 256 MB fills
