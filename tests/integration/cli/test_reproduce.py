"""`lightning-fed reproduce`: the pair coincides, what was interrupted goes on, and the report has what was run."""

from __future__ import annotations

import csv
import logging
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import wandb
from helpers.wandb_reader import read_run

from lightning_fed.algorithms import FedADMM, FedDR, FedProx
from lightning_fed.cli import main
from lightning_fed.cli.commands import reproduce
from lightning_fed.cli.experiments import report
from lightning_fed.cli.experiments.run import Execution, Recipe, Run
from lightning_fed.cli.experiments.settings import femnist, parse_algorithm, synthetic

SMALL = ["reproduce", "synthetic", "--quick", "--sets", "1", "--rounds", "3"]


@pytest.fixture(autouse=True)
def _surroundings(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")  # the command sets it only where nobody else has
    level = logging.getLogger("pytorch_lightning").level
    yield
    wandb.finish()
    logging.getLogger("pytorch_lightning").setLevel(level)
    torch.set_num_threads(1)


def rows(path: str) -> list[dict[str, str]]:
    with open(path, newline="") as file:
        return list(csv.DictReader(file))


def small_run(seed: int = 0, label: str = "FedADMM", rounds: int = 3, **execution: Any) -> Run:
    recipe = Recipe(rounds=rounds, local_steps=5)
    return Run(
        synthetic(1.0), label, parse_algorithm(label), seed, Path("out"), recipe, execution=Execution(**execution)
    )


def test_fedadmm_and_feddr_are_one_run_to_rounding_and_all_of_it_is_written(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--also", "FedAvg", "FedProx:mu=1"])
    out = Path("runs/reproduce/quick")
    table = rows(str(out / "synthetic.csv"))
    labels = ["FedADMM", "FedDR", "FedAvg", "FedProx:mu=1"]
    assert [(row["algorithm"], row["round"]) for row in table] == [(a, str(k)) for a in labels for k in (1, 2, 3)]
    by_label = {label: [float(row["objective"]) for row in table if row["algorithm"] == label] for label in labels}
    assert by_label["FedDR"] == pytest.approx(by_label["FedADMM"], rel=1e-12)
    assert abs(by_label["FedAvg"][-1] - by_label["FedADMM"][-1]) > 1e-3
    assert (out / "synthetic.png").stat().st_size > 10_000
    printed = capsys.readouterr().out
    assert "max |x_bar(FedADMM) - x_bar(FedDR)|" in printed
    assert "largest difference: objective" in printed
    scalars = 60 * 32 + 32 + 32 * 10 + 10  # each of them 8 bytes, ten clients, there and back
    sent = [2 * 10 * 8 * scalars * k for k in (1, 2, 3)]
    assert [int(row["bytes_down"]) + int(row["bytes_up"]) for row in table if row["algorithm"] == "FedAvg"] == sent
    assert f"{sent[-1] / 1e6:11.4g}" in next(line for line in printed.splitlines() if line.startswith("    3  FedAvg"))
    summary = read_run(out / "wandb")
    assert "reproduce/synthetic" in summary.history[-1]
    assert (summary.group, summary.job_type) == ("reproduce", "report")
    run = read_run(out / "synthetic-(1,1)" / "FedDR" / "seed_0")
    assert (run.group, run.job_type) == ("reproduce synthetic-(1,1) FedDR", "reproduce")
    assert [row["federated/objective"] for row in run.history if "federated/objective" in row] == pytest.approx(
        by_label["FedDR"]
    )


def test_the_pair_starts_at_local_models_whatever_the_default_is(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[Run] = []
    monkeypatch.setattr(reproduce, "drive", built.extend)
    main(["reproduce", "all", "--also", "FedADMM:eta=0.1"])
    paper = {"FedADMM": FedADMM(eta=1.0, start="local"), "FedDR": FedDR(eta_hat=1.0, start="local")}
    assert {run.label: run.algorithm for run in built} == {**paper, "FedADMM:eta=0.1": FedADMM(eta=0.1)}
    assert len(built) == (3 + 1) * 3 * 3  # synthetic sets and FEMNIST, seeds, algorithms


def test_the_gap_is_the_largest_entry_of_the_difference() -> None:
    one, other = small_run(), small_run(label="FedDR")
    for run, shift in ((one, 0.0), (other, 3e-9)):
        run.folder.mkdir(parents=True)
        for k in (1, 2, 3):
            run.record([{"round": i} for i in range(k)], np.array([1.0, 2.0 + k * shift]))
    assert report.gaps([one], [other]) == pytest.approx({1: 3e-9, 2: 6e-9, 3: 9e-9}, rel=1e-6)


def test_curves_by_megabytes_end_at_what_was_sent() -> None:
    run = small_run()
    run.folder.mkdir(parents=True)
    sent = {"federated/bytes_down": 3e6, "federated/bytes_up": 1e6}
    run.record([{"round": 0}, {"round": 1, "federated/test_accuracy": 0.5, "federated/objective": 2.0, **sent}], None)
    axes = report.figure({"x": {"FedADMM": [run]}}).axes
    found = {(a.get_title(), a.get_xlabel()): [line.get_xydata().tolist() for line in a.get_lines()] for a in axes}
    assert found["test accuracy", "round"] == [[[2.0, 0.5]]]
    assert found["test accuracy", "megabytes received and sent"] == [[[4.0, 0.5]]]
    assert found["objective", "megabytes received and sent"] == [[[4.0, 2.0]]]
    assert found["train accuracy", "round"] == []


def test_a_baseline_that_diverges_is_told_and_left_out(capsys: pytest.CaptureFixture[str]) -> None:
    main([*SMALL, "--also", "FedAvg:server_lr=1e300"])
    printed = capsys.readouterr().out
    assert "synthetic-(1,1) FedAvg:server_lr=1e300 seed 0 diverged: round 1, client" in printed
    assert "    3  FedDR " in printed


def test_an_interrupted_command_goes_on_and_ends_as_if_it_had_not_been(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    main([*SMALL, "--out", "whole"])
    go, calls = Run.go, []

    def interrupted(run: Run, tick: Any) -> None:
        def count(step: float) -> None:
            calls.append(step)
            if len(calls) == 45:  # in the middle of the second run
                raise KeyboardInterrupt
            tick(step)

        go(run, count)

    monkeypatch.setattr(Run, "go", interrupted)
    with pytest.raises(SystemExit) as stopped:
        main([*SMALL, "--out", "broken"])
    assert stopped.value.code == 130
    assert "Repeat the command to resume" in capsys.readouterr().err
    assert (Path("broken") / "quick" / "synthetic-(1,1)" / "FedDR" / "seed_0" / "last.ckpt").exists()
    before = len(calls)
    main([*SMALL, "--out", "broken"])
    assert len(calls) - before == 20  # two of three rounds of ten clients; the first run is not touched
    assert rows("broken/quick/synthetic.csv") == rows("whole/quick/synthetic.csv")
    assert not list(Path("broken").rglob("last.ckpt*"))


def test_what_is_finished_is_not_run_again(monkeypatch: pytest.MonkeyPatch) -> None:
    main(SMALL)
    monkeypatch.setattr(Run, "go", lambda *_: pytest.fail("was run again"))
    main(SMALL)


def test_more_rounds_go_on_from_a_kept_checkpoint() -> None:
    small_run(rounds=2, keep_checkpoint=True).go()
    ticks: list[float] = []
    longer = small_run(rounds=4, keep_checkpoint=True)
    assert longer.resumes_at() == 2
    longer.go(ticks.append)
    assert sum(ticks) == pytest.approx(2)
    assert len(longer.history()) == 4
    assert longer.done
    assert longer.checkpoint.exists()


def test_a_folder_with_other_settings_is_refused_before_anything_runs(capsys: pytest.CaptureFixture[str]) -> None:
    main(SMALL)
    with pytest.raises(SystemExit) as refused:
        main([*SMALL, "--dtype", "float32"])
    assert refused.value.code == 2
    assert "dtype 'float64', now it is 'float32'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--also", "FedMagic"], "There is no algorithm 'FedMagic'"),
        (["--also", "FedProx:nu=1"], "FedProx has no hyper-parameter 'nu'"),
        (["--also", "FedProx:mu=-1"], "FedProx.mu must be non-negative, got -1"),
        (["--rounds", "0"], "must be a whole number >= 1"),
        (["--seeds", "x"], "invalid int value"),
    ],
)
def test_wrong_options_are_refused_with_the_reason(
    args: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as refused:
        main([*SMALL, *args])
    assert refused.value.code == 2
    assert message in capsys.readouterr().err
    assert not os.path.exists("runs")


def test_femnist_runs_on_generated_writers_and_says_so(capsys: pytest.CaptureFixture[str]) -> None:
    main(["reproduce", "femnist", "--quick", "--rounds", "1", "--dtype", "float32"])
    assert "generated handwriting, not FEMNIST (30 writers" in capsys.readouterr().out
    table = rows("runs/reproduce/quick/femnist.csv")
    assert [row["setting"] for row in table] == ["femnist-generated-small"] * 2
    assert float(table[0]["objective"]) == pytest.approx(float(table[1]["objective"]), rel=1e-4)


def test_femnist_of_a_path_is_named_after_it() -> None:
    assert femnist(Path("data/leaf")).name == "femnist-leaf"
    assert femnist(Path("unipen.npz")).name == "femnist-unipen"


def test_an_algorithm_is_known_by_name_and_hyper_parameters() -> None:
    assert parse_algorithm("FedProx:mu=0.5,weights=uniform") == FedProx(mu=0.5, weights="uniform")


class Runs:
    """Makes a file when it is unpickled."""

    def __reduce__(self) -> Any:
        return Path.touch, (Path("ran"),)


def test_a_checkpoint_that_would_run_code_is_refused() -> None:
    run = small_run(rounds=2)
    run.checkpoint.parent.mkdir(parents=True, exist_ok=True)
    torch.save({"epoch": 1, "more": Runs()}, run.checkpoint)
    with pytest.raises(ValueError, match=r"last\.ckpt holds objects other than tensors.*delete it"):
        run.resumes_at()
    with pytest.raises(Exception, match=r".+"):
        run.go()
    assert not Path("ran").exists()
