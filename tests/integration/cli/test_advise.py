"""`lightning-fed advise --config ...`: right on models whose curvature is known, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from helpers.bowls import Bowl, bowls

import lightning_fed.configs
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.algorithms.compressed import Compressed
from lightning_fed.cli import COMMANDS, main, run
from lightning_fed.prox import L1
from lightning_fed.server import FederatedServer
from lightning_fed.transforms import TopK

CONFIGS = Path(lightning_fed.configs.__file__).parent
SPECTRA = [[4.0, 1.0, 0.5, 0.0], [2.0, 0.1, 0.0, 0.0]]
BOWL = f"""
seed_everything: 0
trainer:
  accelerator: cpu
  default_root_dir: runs/bowl
  min_epochs: 2
  max_epochs: 20
  logger:
    class_path: lightning_fed.tracking.AutoWandbLogger
    init_args: {{project: lightning-fed, save_dir: runs/bowl}}
  callbacks:
    - class_path: lightning_fed.callbacks.TheoryMeter
model: {{class_path: helpers.bowls.Bowl, init_args: {{lr: 0.05}}}}
data:
  class_path: helpers.bowls.Bowls
  init_args:
    spectra: {SPECTRA}
federated:
  algorithm: {{class_path: FedADMM, init_args: {{eta: 10.0, start: local}}}}
  local_steps: 20
"""
#: A fit without a trace.
BARE = [
    *("--trainer.logger=false", "--trainer.callbacks=null", "--trainer.enable_checkpointing=false"),
    *("--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false", "--federated.figure=false"),
]


@pytest.fixture(autouse=True)
def _quiet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fed", "advise", "--as-from-a-shell"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # as LightningCLI itself
    (tmp_path / "bowl.yaml").write_text(BOWL)
    level = logging.getLogger("pytorch_lightning").level
    yield
    logging.getLogger("pytorch_lightning").setLevel(level)


def advised(capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    assert main(["advise", "--config", "bowl.yaml", "--json", *args]) is None
    return json.loads(capsys.readouterr().out)


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", ["lightning-fed", "advise", *args])
        patch.setattr(sys, "path", list(sys.path))
        with pytest.raises(SystemExit) as stop:
            run()
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "Traceback" not in error
    return error


def fitted(*args: str) -> tuple[FederatedServer, Any]:
    """The server and the module after a fit of one round from a command line."""
    sys.argv = sys.argv[:1]  # Lightning warns where both args and sys.argv are given; the fixture restores it
    cli = main(["fit", *args, "--trainer.max_epochs=1", "--trainer.min_epochs=null", *BARE])
    assert cli is not None
    return next(c for c in cli.trainer.callbacks if isinstance(c, FederatedServer)), cli.model


def trial_of_bowls(lr: float, steps: int = 20, rounds: int = 2) -> float:
    """Mean of each client's loss after its last visit, with full gradients, in a few lines of numpy."""
    sets = bowls(*SPECTRA).splits["train"]
    clients = [[tensor.numpy().mean(0) for tensor in sets[cid].tensors] for cid in sets]
    x = Bowl().x().detach().numpy()
    for _ in range(rounds):
        models = []
        for A, b in clients:
            y = x.copy()
            for _ in range(steps):
                y -= lr * (A @ y - b)
            models.append(y)
        x = np.mean(models, 0)
    return float(np.mean([0.5 * y @ A @ y - b @ y for y, (A, b) in zip(models, clients, strict=True)]))


def test_everything_known_is_found(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys)
    assert found["measured"]["L"] == pytest.approx(4.0, rel=2e-3)
    assert found["measured"]["lowest"] == pytest.approx(0.0, abs=0.05)
    assert (found["measured"]["clients"], found["measured"]["of"], found["measured"]["parameters"]) == (2, 2, 4)
    assert found["measured"]["samples"] == [5, 5]
    assert found["guaranteed"]["eta"] == pytest.approx(1.1 * 2.397181 * 4, rel=2e-3)
    tried = {one["lr"]: one["loss"] for one in found["trial"]["tried"]}
    assert tried.keys() >= {0.05, 0.1}  # batches are all of a client's data
    for lr, loss in tried.items():
        reference = trial_of_bowls(lr)
        assert loss == pytest.approx(reference, rel=1e-9) if abs(reference) < 1e6 else loss is None or loss > 1e6
    best = found["lr"]["advised"]
    assert tried[best] == min(loss for loss in tried.values() if loss is not None)
    assert best > 0.05
    assert found["lr"] == {"key": "model.init_args.lr", "now": 0.05, "advised": best}
    recommended = {"mean": "active", "start": "server", "weights": "uniform", "alpha": 1.0}
    assert found["recommended"]["class_path"] == "lightning_fed.algorithms.FedADMM"
    assert found["recommended"]["init_args"].items() >= recommended.items()
    assert found["recommended"]["init_args"]["eta"] == pytest.approx(0.3 / (20 * best), rel=5e-3)
    assert found["settings"]["start"] == {"now": "local", "advised": "server"}
    assert found["reasons"].keys() >= {"mean", "eta", "start", "lr"}
    assert found["now"]["init_args"]["eta"] == 10
    assert found["warnings"] == []


def test_the_command_runs_what_is_recommended(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, "--federated.algorithm.weights=samples", "--ckpt_path=last")
    assert "--ckpt_path=last" not in found["command"]  # another algorithm cannot resume
    assert found["command"][:2] == ["lightning-fed", "fit"]
    server, module = fitted(*found["command"][2:])
    eta = found["recommended"]["init_args"]["eta"]
    assert server.algorithm == FedADMM(eta=eta, mean="active", weights="samples")
    assert module.lr == found["lr"]["advised"]


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        (
            ["--federated.algorithm=FedDR", "--federated.algorithm.g=L1", "--federated.algorithm.g.c=0.5"],
            L1(0.5),
        ),
        (["--trainer.max_epochs=4"], FedAvg(weights="uniform")),
        (["--mean=all"], FedADMM(eta=1.0)),
        (
            ["--federated.clients_per_round=1", "--federated.algorithm=FedAvg", "--trainer.max_epochs=90"],
            FedADMM(eta=0.3, mean="active", weights="samples"),
        ),
    ],
    ids=["g", "few", "all", "fedavg"],
)
def test_commands_change_classes_and_keep_what_is_minimised(
    capsys: pytest.CaptureFixture[str], args: list[str], expected: Any
) -> None:
    found = advised(capsys, "--no-trial", *args)
    assert found["trial"] is None
    algorithm = fitted(*found["command"][2:])[0].algorithm
    if isinstance(expected, L1):
        expected = FedADMM(eta=0.3, mean="active", g=expected)
    assert algorithm == expected


def test_compression_is_kept(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    topk = {"class_path": "lightning_fed.transforms.TopK", "init_args": {"k": 2}}
    inner = {"class_path": "lightning_fed.algorithms.FedDR", "init_args": {"eta_hat": 10.0, "start": "local"}}
    own = {"class_path": "lightning_fed.algorithms.Compressed", "init_args": {"algorithm": inner, "transform": topk}}
    content = yaml.safe_load(BOWL)
    content["federated"]["algorithm"] = own
    (tmp_path / "bowl.yaml").write_text(yaml.safe_dump(content))
    found = advised(capsys, "--no-trial", "--write=advised.yaml")
    expected = Compressed(FedADMM(eta=0.3, mean="active"), TopK(2))
    assert fitted(*found["command"][2:])[0].algorithm == expected
    assert fitted("--config=advised.yaml")[0].algorithm == expected


def test_a_config_is_written_that_runs_it(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "sub").mkdir()
    found = advised(capsys, "--write", "sub/advised.yaml")
    written = yaml.safe_load(Path("sub/advised.yaml").read_text())
    assert written["base"] == "../bowl.yaml"
    eta, lr = found["recommended"]["init_args"]["eta"], found["lr"]["advised"]
    server, module = fitted("--config", "sub/advised.yaml")
    assert (server.algorithm, module.lr) == (FedADMM(eta=eta, mean="active"), lr)
    advised(capsys, "--no-trial", "--federated.local_steps=10", "--write", "all.yaml")  # with overrides: all settings
    assert "base" not in yaml.safe_load(Path("all.yaml").read_text())
    server, module = fitted("--config", "all.yaml")
    assert (server.algorithm, server.local_steps, module.lr) == (FedADMM(eta=0.6, mean="active"), 10, 0.05)
    assert "sub/advised.yaml exists" in refused(capsys, "--config", "bowl.yaml", "--write", "sub/advised.yaml")


def test_present_settings_are_warned_of(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, "--no-trial", "--federated.algorithm.eta=1", "--trainer.max_epochs=4")["warnings"]
    assert {(one["of"], one["code"]) for one in found} == {("present", "unsolved"), ("present", "few_visits")}
    found = advised(capsys, "--no-trial", "--model.lr=0.19")["warnings"]
    assert [one["code"] for one in found] == ["diverges"]
    assert "lr * (L + penalty) = 2.66 >= 2" in found[0]["text"]


def test_the_text_is_short_and_says_what_to_do(capsys: pytest.CaptureFixture[str]) -> None:
    main(["advise", "--config", "bowl.yaml", "--model.lr=0.19"])
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert lines[0].startswith("2 clients of 5 to 5 samples, 2 per round, 20 rounds, 20 local steps, 4 parameters")
    order = [lines.index(title) for title in ("Why", "Guaranteed, slow", "To run it")]
    assert order == sorted(order)
    assert next(line for line in lines if "mean" in line).split() == ["mean", "all", "active"]
    assert shlex.split(lines[-1])[:4] == ["lightning-fed", "fit", "--config", "bowl.yaml"]
    assert len(lines) < 40
    assert max(map(len, lines[:-1])) <= 100
    assert "Trying learning rates" in err


def test_a_rate_that_no_config_has_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    main(["advise", "--config", "bowl.yaml", "--model=helpers.bowls.FixedBowl"])
    out = capsys.readouterr().out
    assert "lr=" not in out.splitlines()[-2]
    assert "and set the optimiser's lr to" in out.splitlines()[-1]


def test_other_optimisers_are_tried_by_scale(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, "--model=helpers.bowls.AdamBowl", "--model.lr=0.05")
    assert found["recommended"]["class_path"] == "lightning_fed.algorithms.FedAvg"
    assert [one["lr"] for one in found["trial"]["tried"]][:2] == [0.05, 0.1]
    assert len({one["loss"] for one in found["trial"]["tried"]}) > 1


def test_it_writes_and_logs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first = advised(capsys, "--clients", "1", "--steps", "0")
    assert first["measured"]["clients"] == first["trial"]["clients"] == 1
    assert [path.name for path in tmp_path.iterdir()] == ["bowl.yaml"]
    again = advised(capsys, "--clients", "1", "--steps", "0")
    for one in first["trial"]["tried"] + again["trial"]["tried"]:
        del one["seconds"]
    assert first == again  # seeded


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "model"),
        (["--config", "bowl.yaml", "--clients=0"], "argument --clients: must be a whole number >= 1, got '0'"),
        (["--config", "bowl.yaml", "--steps=-1"], "argument --steps: must be a whole number >= 0, got '-1'"),
        (["--config", "bowl.yaml", "--mean=some"], "argument --mean: invalid choice: 'some'"),
        (["--config", "bowl.yaml", "--federated.algorithm.eta=-1"], "FedADMM.eta must be positive, got -1.0"),
        (["--config", "bowl.yaml", "--model=helpers.evaluated.Manual"], "Manual reports no loss to differentiate"),
        (
            ["--config", "bowl.yaml", "--model=helpers.bowls.Slope"],
            "The curvature of Slope's loss is 0 at its first model",
        ),
    ],
    ids=str,
)
def test_what_cannot_be_measured_is_said(capsys: pytest.CaptureFixture[str], args: list[str], message: str) -> None:
    assert message in " ".join(refused(capsys, *args).split())


def test_help_names_the_options_and_the_command_is_listed(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["advise", "--help"])
    assert stop.value.code == 0
    out = capsys.readouterr().out
    assert all(word in out for word in ("--clients", "--steps", "--json", "--write", "--no-trial", "--config FILE"))
    assert "advise" in COMMANDS


# -- following the advice pays --------------------------------------------------------------------------------------

SMALL = ["--trainer.max_epochs=15", "--federated.local_steps=30", "--federated.evaluate_every=15"]
WRITERS = ["--data.writers=6", "--data.pixels.invert=true", "--federated.clients_per_round=3", "--data.batch_size=10"]
PERCEPTRON = ["--model=lightning_fed.models.MLP", "--model.sizes=[784,32,62]", "--model.lr=0.1"]


@pytest.mark.parametrize(
    "args",
    [
        ["synthetic_0_0_fedadmm.yaml", "--model.log_train=false"],
        ["synthetic_0.5_0.5_fedadmm.yaml", "--model.log_train=false"],
        ["synthetic_fedadmm.yaml", "--model.log_train=false"],
        ["femnist_fedadmm.yaml", *WRITERS, *PERCEPTRON, "--model.log_train=false"],
    ],
    ids=["0", "0.5", "1", "writers"],
)
@pytest.mark.filterwarnings("ignore:The data are generated")
def test_following_the_advice_beats_the_config(capsys: pytest.CaptureFixture[str], args: list[str]) -> None:
    own = ["--config", str(CONFIGS / args[0]), *args[1:], *SMALL]
    main(["advise", *own, "--steps=0", "--clients=3", "--trial-rounds=1", "--json"])
    command = json.loads(capsys.readouterr().out)["command"]
    assert train_loss(command[2:]) < 0.9 * train_loss(own)


def train_loss(args: list[str]) -> float:
    sys.argv = sys.argv[:1]
    cli = main(["fit", *args, *BARE, "--trainer.limit_val_batches=0", "--federated.compile=false"])
    assert cli is not None
    return float(cli.trainer.callback_metrics["federated/train_loss"])
