"""`lightning-fed tune`: promoted trials go on bit for bit, a killed tune resumes with the same end."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from helpers.kills import differences, known
from helpers.tunes import CONFIG, ETA, checkpoint_of, command_line, legs, study, table, tune
from optuna.trial import TrialState

from lightning_fed import FederatedServer
from lightning_fed.cli import FederatedCLI, main
from lightning_fed.cli.tuning.config import flat
from lightning_fed.cli.tuning.journal import Journal
from lightning_fed.cli.tuning.trial import Runner

EXACT = ["--model=helpers.tuned.OneCycle", "--federated.store=disk", "--federated.evaluate_every=0"]
SPACE = [ETA, "--search", "model.lr=choice:0.01,0.1"]
HALVING = ["--trials=3", "--rounds=5", "--min-rounds=1", "--reduction=3"]  # rungs 1, 3, 5 with 3, 1, 1 trials


def whole(out: Path) -> None:
    tune(out, *EXACT, *SPACE, *HALVING)


def run(*args: str) -> FederatedCLI:
    with command_line():
        done = main(list(args))
    assert done is not None
    return done


def server_of(cli: FederatedCLI) -> FederatedServer:
    return next(callback for callback in cli.trainer.callbacks if isinstance(callback, FederatedServer))


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory, run_cache: Path) -> Path:
    """A tune that was not interrupted."""
    out = tmp_path_factory.mktemp("tune") / "search"
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LIGHTNING_FED_CACHE", str(run_cache))
        whole(out)
    return out


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # a fit has no rungs
def test_a_promoted_trial_is_bit_for_bit_the_uninterrupted_run(finished: Path, tmp_path: Path) -> None:
    best = table(finished)[0]
    assert (best["rung"], best["rounds"]) == ("3", "5")  # went on from its checkpoint twice
    fit = ["fit", "--config", str(finished / "best.yaml"), f"--trainer.default_root_dir={tmp_path}"]
    uninterrupted = run(*fit, "--federated.evaluate_every=5")
    resumed = run(*fit, f"--ckpt_path={checkpoint_of(finished, int(best['trial']))}")
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
        run(*command.split()[1:], "--print_config")
    by_command = yaml.safe_load(capsys.readouterr().out)
    with pytest.raises(SystemExit):
        run("fit", "--config", str(finished / "best.yaml"), "--print_config")
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
        if kill is in_promoted:
            best = checkpoint_of(out, int(table(finished)[0]["trial"]))
            loop = torch.load(best, weights_only=True)["loops"]["fit_loop"]["state_dict"]
            assert loop["federated"]["rounds_done"] == 2  # on the way from 1 to 3
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
