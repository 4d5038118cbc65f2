"""`lightning-fed tune`: promoted trials go on bit for bit, a killed tune resumes, the test data choose nothing."""

from __future__ import annotations

import csv
import os
import signal
import sys
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import optuna
import pytest
import wandb
import yaml
from helpers.kills import differences, known
from helpers.wandb_reader import read_run
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState

import lightning_fed.configs
from lightning_fed import FederatedServer
from lightning_fed.cli import FederatedCLI, main, run
from lightning_fed.cli.tuning.config import flat
from lightning_fed.cli.tuning.journal import Journal
from lightning_fed.cli.tuning.trial import Runner

CONFIG = Path(lightning_fed.configs.__file__).parent / "synthetic_fedadmm.yaml"
FIT = [
    *("--config", str(CONFIG), "--data.init_args.clients=3", "--federated.clients_per_round=2"),
    *("--federated.local_steps=2", "--trainer.logger=false", "--trainer.limit_val_batches=0"),
]
ETA = "--search=federated.algorithm.eta=log:0.1:10"
STATES = ("finished", "eliminated", "diverged", "failed")
EXACT = ["--model=helpers.tuned.OneCycle", "--federated.store=disk", "--federated.evaluate_every=0"]
SPACE = [ETA, "--search", "model.lr=choice:0.01,0.1"]
HALVING = ["--trials=3", "--rounds=5", "--min-rounds=1", "--reduction=3"]  # rungs 1, 3, 5 with 3, 1, 1 trials


def tune(out: Path, *args: str, fit: list[str] = FIT) -> None:
    main(["tune", *fit, f"--out={out}", *args])


def whole(out: Path) -> None:
    tune(out, *EXACT, *SPACE, *HALVING)


def table(out: Path) -> list[dict[str, str]]:
    with (out / "table.csv").open(newline="") as file:
        return list(csv.DictReader(file))


def checkpoint_of(out: Path, number: int) -> Path:
    return out / "trials" / f"{number:04d}" / "checkpoint" / "last.ckpt"


def server_of(cli: FederatedCLI) -> FederatedServer:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer))


def study(out: Path) -> optuna.Study:
    storage = JournalStorage(JournalFileBackend(str(out / "optuna.log")))
    return optuna.load_study(study_name=out.name, storage=storage)


def legs(out: Path) -> list[str]:
    return sorted(str(path.relative_to(out / "trials")) for path in out.glob("trials/*/rung_*.json"))


@pytest.fixture(autouse=True)
def _offline(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])  # Lightning warns where both args and sys.argv are given
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator
    yield
    wandb.finish()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run_cache: Path) -> Path:
    """A tune that was not interrupted."""
    out = tmp_path_factory.mktemp("tune") / "search"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-fed"])
        patch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
        patch.setenv("LIGHTNING_FED_CACHE", str(run_cache))
        whole(out)
    return out


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # a fit has no rungs
def test_a_promoted_trial_is_bit_for_bit_the_uninterrupted_run(finished: Path, tmp_path: Path) -> None:
    best = table(finished)[0]
    assert (best["rung"], best["rounds"]) == ("3", "5")  # went on from its checkpoint twice
    fit = ["fit", "--config", str(finished / "best.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    uninterrupted = main([*fit, "--federated.evaluate_every=5"])
    resumed = main([*fit, f"--ckpt_path={checkpoint_of(finished, int(best['trial']))}"])
    assert uninterrupted is not None
    assert resumed is not None
    assert resumed.trainer.current_epoch == uninterrupted.trainer.current_epoch == 5
    ours, theirs = (known(server_of(cli)) for cli in (uninterrupted, resumed))
    assert len(ours) > 4
    assert differences(ours, theirs) == []
    assert float(uninterrupted.trainer.callback_metrics["federated/objective"]) == float(best["federated/objective"])


def test_the_best_trial_goes_on_and_the_others_lose_their_checkpoints(finished: Path) -> None:
    rows = table(finished)
    assert [row["state"] for row in rows] == ["finished", "eliminated", "eliminated"]
    assert [(row["rung"], row["rounds"]) for row in rows] == [("3", "5"), ("1", "1"), ("1", "1")]
    assert legs(finished) == sorted(
        f"{int(row['trial']):04d}/rung_{rung}.json" for row in rows for rung in range(int(row["rung"]))
    )
    first = {int(row["trial"]): Journal(finished).read(int(row["trial"])).legs[0].value for row in rows}
    assert [int(row["trial"]) for row in rows] == sorted(first, key=lambda number: first[number])
    kept = [checkpoint_of(finished, number).parent.exists() for number in range(3)]
    assert kept == [number == int(rows[0]["trial"]) for number in range(3)]


def test_optuna_reads_the_study(finished: Path) -> None:
    found = study(finished)
    by_number = {int(row["trial"]): row for row in table(finished)}
    for trial in found.trials:
        row = by_number[trial.number]
        assert {name: str(value) for name, value in trial.params.items()} == {name: row[name] for name in trial.params}
        assert trial.state == (TrialState.COMPLETE if row["state"] == "finished" else TrialState.PRUNED)
        assert trial.intermediate_values[int(row["rounds"])] == float(row["federated/objective"])
    assert sorted(found.best_trial.intermediate_values) == [1, 3, 5]
    assert found.best_trial.params.keys() == {"federated.algorithm.init_args.eta", "model.init_args.lr"}


def test_the_best_settings_are_a_config_a_command_and_a_figure(
    finished: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    best, own = table(finished)[0], yaml.safe_load((finished / "best.yaml").read_text())
    assert (finished / own.pop("base")).resolve() == CONFIG.resolve()
    chosen = flat(own)
    assert chosen["federated.algorithm.init_args.eta"] == float(best["federated.algorithm.init_args.eta"])
    assert chosen["trainer.max_epochs"] == 5
    whole(finished)  # everything is done: only the report comes again
    out = capsys.readouterr().out
    assert "rung 1/3" not in out
    (command,) = [line.strip() for line in out.splitlines() if "lightning-fed fit --config" in line and "eta" in line]
    with pytest.raises(SystemExit):
        main([*command.split()[1:], "--print_config"])
    by_command = yaml.safe_load(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        main(["fit", "--config", str(finished / "best.yaml"), "--print_config"])
    assert yaml.safe_load(capsys.readouterr().out) == by_command
    assert (finished / "tune.png").stat().st_size > 10_000


# -- a tune that is killed --------------------------------------------------------------------------------------


def killed(out: Path, patch: Callable[[pytest.MonkeyPatch], None]) -> int:
    """Run the tune in a forked child; the signal that ended it."""
    pid = os.fork()
    if pid == 0:
        with pytest.MonkeyPatch.context() as monkeypatch:
            patch(monkeypatch)
            try:
                whole(out)
            finally:
                os._exit(1)
    return os.waitpid(pid, 0)[1]


def die_before_entry(count: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Kill the process when a leg is over and its checkpoint written, but not its entry in the journal."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        add = Journal.add

        def dying(self: Journal, *args: Any) -> None:
            if len(legs(self.folder)) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            add(self, *args)

        monkeypatch.setattr(Journal, "add", dying)

    return patch


def die_in_round(count: int) -> Callable[[pytest.MonkeyPatch], None]:
    """Kill the process in the middle of a leg, in its round number ``count``; every round has a checkpoint."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        played, run_round = list[int](), FederatedServer.run_round

        def dying(self: FederatedServer, *args: Any) -> Any:
            played.append(1)
            if len(played) == count:
                os.kill(os.getpid(), signal.SIGKILL)
            return run_round(self, *args)

        monkeypatch.setattr(FederatedServer, "run_round", dying)
        monkeypatch.setattr("lightning_fed.cli.tuning.rung.EVERY", timedelta(microseconds=1))

    return patch


def test_a_tune_that_is_killed_again_and_again_ends_with_the_same_table(
    finished: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "search"
    before_second, in_promoted, before_last = die_before_entry(1), die_in_round(3), die_before_entry(4)
    for kill, done in ((before_second, 1), (in_promoted, 3), (before_last, 4)):
        assert killed(out, kill) == signal.SIGKILL
        assert len(legs(out)) == done
    ran, go = [], Runner.go
    monkeypatch.setattr(Runner, "go", lambda self, trial: (ran.append(trial.number), go(self, trial))[1])
    whole(out)
    assert len(ran) == 1  # what was in the journal is not run again
    assert (out / "table.csv").read_bytes() == (finished / "table.csv").read_bytes()
    assert legs(out) == legs(finished)


def test_another_tune_in_the_same_folder_is_refused_by_name(finished: Path) -> None:
    for args, named in {
        ("--search=federated.algorithm.eta=log:0.1:9", SPACE[1], SPACE[2], *HALVING): "search.federated.algorithm",
        (*SPACE, *HALVING[:-1]): "reduction 3, now it is 2",
        (*SPACE, *HALVING, "--data.init_args.a=0.5"): "config.data.init_args.a 1.0, now it is 0.5",
    }.items():
        with pytest.raises(ValueError, match=rf"holds a tune with {named}"):
            tune(finished, *EXACT, *args)


# -- other budgets, objectives and ends of trials ---------------------------------------------------------------


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


def test_validation_on_the_test_data_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="val_loss would be measured on the test data: the data have no validation"):
        tune(tmp_path / "out", "--trainer.limit_val_batches=1.0", ETA, "--objective=val_loss", "--rounds=1")


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


# -- what a tune refuses before any work ------------------------------------------------------------------------

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
    (ETA, "--seed_everything=true", "--data.init_args.seed=0"): "seed_everything: trials must be repeatable",
    (ETA, "--ckpt_path=last"): "ckpt_path: trials start at round 0",
    (ETA, "--space=gone.yaml"): "No such file or directory",
    (ETA, "--federated.algorithm.alpha=x"): "Expected a float. Got value: x",
}


@pytest.mark.parametrize("args", REFUSED, ids=lambda args: " ".join(args) or "nothing")
def test_a_wrong_command_is_one_line_and_no_work(
    args: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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
