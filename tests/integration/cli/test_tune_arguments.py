"""`lightning-fed tune`: a wrong command is one line on stderr and exit code 2, before any work."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from helpers.tunes import ETA, FIT

from lightning_fed.cli import main, run

REFUSED = {
    (): "There is nothing to search",
    ("--search=federated.algorithm.etta=log:1:2",): "has no key federated.algorithm.etta. The nearest are"
    " federated.algorithm.eta",
    ("--search=federated.eta=log:1:2",): "has no key federated.eta. The nearest are",
    (ETA, "--search=federated.algorithm.init_args.eta=log:1:2"): "init_args.eta is searched twice",
    ("--search=federated.local_steps=uniform:1:2.5",): "federated.local_steps=1.0: ",
    ("--search=model.lr=log:0:1",): "the lowest value of a log scale must be positive, got 0.0",
    ("--search=model.lr=int:1:1.5",): "int needs two whole numbers",
    ("--search=model.lr=uniform:2:1",): "needs LOW < HIGH",
    ("--search=model.lr=choice:1",): "give two or more choices",
    ("--search=model.lr=normal:1",): "'normal:1' is no range. Give log:LOW:HIGH",
    ("--search=model.lr",): "--search takes KEY=RANGE",
    ("--search=trainer.max_epochs=int:1:9",): "tune sets trainer.max_epochs itself. Use --rounds",
    (ETA, "--objective=federated/test_loss"): "must not be a metric of the test data, got 'federated/test_loss'",
    (ETA, "--rounds=4", "--min-rounds=5"): "--min-rounds must be at most the budget of 4 rounds, got 5",
    (ETA, "--rounds=4", "--bytes=1MB"): "Give the budget in --rounds or in --bytes, not in both",
    (ETA, "--bytes=many"): "must be a number of bytes such as 20MB",
    (ETA, "--reduction=1"): "must be a whole number >= 2, got '1'",
    (ETA, "--val-fraction=1"): "--val-fraction must lie in [0, 1), got 1. Try 0.1.",
    (ETA, "--seed_everything=true", "--data.init_args.seed=0"): "seed_everything: trials must be repeatable",
    (ETA, "--ckpt_path=last"): "ckpt_path: trials start at round 0",
    (ETA, "--space=gone.yaml"): "No such file or directory",
    (ETA, "--federated.algorithm.alpha=x"): "Expected a float. Got value: x",
}


@pytest.mark.parametrize("args", REFUSED, ids=lambda args: " ".join(args) or "nothing")
def test_a_wrong_command_is_one_line_and_no_work(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator
    monkeypatch.setattr(sys, "argv", ["lightning-fed", "tune", *FIT, *args, f"--out={tmp_path / 'search'}"])
    with pytest.raises(SystemExit) as stop:
        run()
    error = capsys.readouterr().err
    assert stop.value.code == 2
    assert REFUSED[args] in error
    assert error.count("\n") == 1
    assert not (tmp_path / "search").exists()


def test_without_optuna_an_error_names_the_extra(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "optuna", None)
    with pytest.raises(SystemExit):
        main(["tune", ETA])
    assert 'lightning-fed tune needs Optuna. Install it: pip install "lightning-fed[optuna]"' in capsys.readouterr().err
