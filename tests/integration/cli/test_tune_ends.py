"""`lightning-fed tune`: budgets in bytes, other objectives, trials that diverge, fail or stop early, W&B."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from helpers.tunes import ETA, FIT, checkpoint_of, command_line, study, table, tune
from helpers.wandb_reader import read_run
from optuna.trial import TrialState

from lightning_fed.cli import main
from lightning_fed.cli.tuning.journal import Journal
from lightning_fed.datamodules import Synthetic

STATES = ("finished", "eliminated", "diverged", "failed")


@pytest.mark.filterwarnings("ignore:lr . penalty")
def test_trials_that_diverge_or_are_refused_are_recorded_and_the_budget_may_be_bytes(tmp_path: Path) -> None:
    (tmp_path / "space.yaml").write_text("model.lr: [0.01, 1.0e+30]\nfederated.algorithm.alpha: choice:1.0,-1.0\n")
    halving = ["--bytes=100kB", "--min-bytes=40kB", "--trials=4", "--sampler=random", "--seed=18"]
    tune(tmp_path / "out", f"--space={tmp_path / 'space.yaml'}", *halving)
    rows = {state: [row for row in table(tmp_path / "out") if row["state"] == state] for state in STATES}
    assert all(rows[state] for state in STATES)
    assert all("alpha" in row["why"] for row in rows["failed"])
    assert all("is nan" in row["why"] or "not finite" in row["why"] for row in rows["diverged"])
    assert {row["model.init_args.lr"] for row in rows["diverged"]} == {"1e+30"}
    (best,) = rows["finished"]
    trial = Journal(tmp_path / "out").read(int(best["trial"]))
    assert trial is not None
    sent = 2 * 2 * 4 * 2282  # two clients receive and send 2282 parameters
    assert [(leg.rounds, leg.sent) for leg in trial.legs] == [(2, 2 * sent), (3, 3 * sent), (3, 3 * sent)]
    assert [leg.state for leg in trial.legs] == ["reached"] * 3  # at 40, 80 and 100 kB
    assert [point[0] for point in trial.last.curve] == [1, 2, 3]
    states = [trial.state for trial in study(tmp_path / "out").trials]
    assert states.count(TrialState.FAIL) == len(rows["failed"])
    assert states.count(TrialState.PRUNED) == len(rows["diverged"]) + len(rows["eliminated"])


@pytest.mark.filterwarnings("ignore:The loss of client")
def test_a_trial_whose_objective_is_not_finite_has_diverged_and_all_of_them_are_an_error(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"No trial came to an end\. Trial 0 diverged: .*objective is inf after 2"):
        tune(tmp_path / "out", "--model=helpers.tuned.Overflowing", ETA, "--rounds=3", "--min-rounds=3", "--trials=1")


def test_a_metric_of_validation_is_maximised_and_early_stopping_ends_a_trial(tmp_path: Path) -> None:
    stopping = ["--trainer.callbacks=EarlyStopping", "--trainer.callbacks.monitor=val_acc"]
    stopping += ["--trainer.callbacks.stopping_threshold=0", "--trainer.callbacks.mode=max"]
    objective = ["--objective=val_acc", "--maximize", "--data=helpers.tuned.HeldOut", "--trainer.limit_val_batches=1.0"]
    halving = ["--trials=2", "--rounds=4", "--seed=3"]
    tune(tmp_path / "out", *objective, *stopping, "--search=model.lr=choice:0.0001,0.1", *halving)
    best, other = table(tmp_path / "out")
    assert float(best["val_acc"]) > float(other["val_acc"])
    assert (best["rounds"], best["state"], best["rung"]) == ("1", "finished", "3")
    assert (other["rounds"], other["state"], other["rung"]) == ("1", "eliminated", "1")


def test_by_default_trials_are_compared_by_validation_data_that_clients_hold_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with command_line():
        main(["tune", *FIT, ETA, "--rounds=1", "--trials=2", f"--out={tmp_path / 'out'}"])
    printed = capsys.readouterr().out
    said = "tune compares trials by 'federated/val_loss', and the data have no validation split: every client holds out"
    assert printed.count(f"{said} 10%") == 1
    assert "trains on all training data" in printed
    best, other = table(tmp_path / "out")
    assert float(best["federated/val_loss"]) < float(other["federated/val_loss"])
    kept = torch.load(checkpoint_of(tmp_path / "out", int(best["trial"])), weights_only=True)
    examples = next(state for state in kept["callbacks"].values() if "federation" in state)["federation"]["examples"]
    whole = Synthetic(clients=3)
    whole.setup()
    assert examples == [n - round(0.1 * n) for n in map(whole.num_examples, whole.client_ids)]


def test_an_objective_of_training_data_holds_out_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    tune(tmp_path / "out", ETA, "--rounds=1", "--trials=1")
    assert "holds out" not in capsys.readouterr().out


def test_validation_on_the_test_data_is_refused(tmp_path: Path) -> None:
    none = ["--val-fraction=0", "--trainer.limit_val_batches=1.0"]
    with pytest.raises(ValueError, match="val_loss would be measured on the test data: the data have no validation"):
        tune(tmp_path / "out", *none, ETA, "--objective=val_loss", "--rounds=1")


def test_an_objective_that_is_not_logged_is_an_error_that_names_the_metrics(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"loss was not logged in the first 1 rounds.*federated/objective") as error:
        tune(tmp_path / "out", ETA, "--objective=loss", "--rounds=1")
    assert "test" not in str(error.value)


def test_all_trials_are_in_one_group_of_wandb(tmp_path: Path) -> None:
    out = tmp_path / "search"
    fit = [arg for arg in FIT if arg != "--trainer.logger=false"]
    tune(
        out, "--trainer.logger.project=mine", ETA, "--rounds=2", "--min-rounds=2", "--trials=2", "--name=first", fit=fit
    )
    runs = [read_run(out / "trials" / f"{number:04d}") for number in range(2)]
    for row in table(out):
        run = runs[int(row["trial"])]
        assert (run.name, run.group, run.job_type) == (f"first trial {row['trial']}", "first", "tune")
        assert run.series("federated/objective")[1] == pytest.approx(float(row["federated/objective"]), rel=1e-12)
        eta = run.config["federated"]["algorithm"]["eta"]
        assert eta == pytest.approx(float(row["federated.algorithm.init_args.eta"]), rel=1e-12)
    summary = read_run(out / "wandb")
    assert (summary.group, summary.job_type) == ("first", "tune")
    assert {"tune/table", "tune/figure"} <= {name for row in summary.history for name in row}
