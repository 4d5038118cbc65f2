"""`lightning-fed advise --config ...`: right on models whose curvature is known, and leaves nothing behind."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import lightning_fed.configs
from lightning_fed.cli import COMMANDS, main, run

CONFIGS = Path(lightning_fed.configs.__file__).parent
BOWL = """
seed_everything: 0
trainer:
  accelerator: cpu
  default_root_dir: runs/bowl
  min_epochs: 2
  logger:
    class_path: lightning_fed.tracking.AutoWandbLogger
    init_args: {project: lightning-fed, save_dir: runs/bowl}
  callbacks:
    - class_path: lightning_fed.callbacks.TheoryMeter
model: {class_path: helpers.bowls.Bowl, init_args: {lr: 0.05}}
data:
  class_path: helpers.bowls.Bowls
  init_args:
    spectra: [[4.0, 1.0, 0.5, 0.0], [2.0, 0.1, 0.0, 0.0]]
federated:
  algorithm: {class_path: FedADMM, init_args: {eta: 10.0}}
  local_steps: 20
"""


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


def test_known_curvature_gives_the_known_advice(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys)
    assert found["measured"]["L"] == pytest.approx(4.0, rel=2e-3)
    assert found["measured"]["lowest"] == pytest.approx(0.0, abs=0.05)
    assert (found["measured"]["clients"], found["measured"]["of"], found["measured"]["parameters"]) == (2, 2, 4)
    assert found["measured"]["samples"] == [5, 5]
    advice = found["advice"]
    assert advice.keys() == {"eta", "alpha", "lr", "local_steps"}
    assert {name: one["verdict"] for name, one in advice.items()} == dict.fromkeys(advice, "ok")
    assert {name: one["now"] for name, one in advice.items()} == {"eta": 10, "alpha": 1, "lr": 0.05, "local_steps": 20}
    assert advice["lr"]["advised"] == pytest.approx(1 / 14, rel=2e-3)
    assert advice["local_steps"]["advised"] == 2  # (4/14)^2 < 1/10
    assert "above 9.58" in advice["eta"]["reason"]
    assert found["algorithm"]["name"] == "FedADMM"


def test_a_learning_rate_that_is_too_large_is_called_out(capsys: pytest.CaptureFixture[str]) -> None:
    main(["advise", "--config", "bowl.yaml", "--model.lr=0.19"])
    out = capsys.readouterr().out
    line = next(line for line in out.splitlines() if line.startswith("lr"))
    assert line.split() == ["lr", "0.19", "0.07143", "diverges"]
    assert "2 / (L + penalty) = 0.1429 on" in " ".join(out.split())
    assert "Now lr * (L + penalty) = 2.66." in " ".join(out.split())
    assert out.startswith("FedADMM, 4 parameters, 2 clients of 5 to 5 samples\nMeasured on 2 clients (power iteration)")


def test_a_penalty_that_is_too_small_is_called_out(capsys: pytest.CaptureFixture[str]) -> None:
    advice = advised(capsys, "--data.spectra=[[4.0, 1.0, 0.0, -2.0]]", "--federated.algorithm.eta=1.0")["advice"]["eta"]
    assert advice["verdict"] == "too small"
    assert advice["advised"] == pytest.approx(10 ** (1 / 20) * 6 - 4, rel=2e-2)


def test_other_algorithms_speak_their_own_words(capsys: pytest.CaptureFixture[str]) -> None:
    found = advised(capsys, "--federated.algorithm=FedDR", "--federated.algorithm.eta_hat=10.0")["advice"]
    assert found["eta_hat"]["verdict"] == "too large"
    assert found["eta_hat"]["advised"] < 10
    found = advised(
        capsys, "--federated.algorithm=FedAvg", "--federated.local_steps=null", "--federated.local_epochs=3"
    )
    assert found["advice"].keys() == {"lr", "local_steps"}
    assert found["advice"]["local_steps"]["now"] == 3  # one batch each


def test_it_writes_and_logs_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    main(["advise", "--config", "bowl.yaml", "--clients", "1", "--steps", "0"])
    assert "Measured on 1 clients" in capsys.readouterr().out
    assert [path.name for path in tmp_path.iterdir()] == ["bowl.yaml"]


def test_advice_on_a_config_of_ours(capsys: pytest.CaptureFixture[str]) -> None:
    config = str(CONFIGS / "synthetic_fedadmm.yaml")
    small = ["--data.init_args.clients=3", "--federated.clients_per_round=2", "--ckpt_path=last"]
    main(["advise", "--config", config, *small, "--clients=2", "--steps=1", "--json"])
    found = json.loads(capsys.readouterr().out)
    assert found["measured"]["parameters"] == 2282
    assert found["measured"]["L"] > 1
    assert found["advice"]["eta"]["now"] == 1.0
    assert found["advice"]["local_steps"]["now"] == 300


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ([], "model"),
        (["--config", "bowl.yaml", "--clients=0"], "argument --clients: must be a whole number >= 1, got '0'"),
        (["--config", "bowl.yaml", "--steps=-1"], "argument --steps: must be a whole number >= 0, got -1"),
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
    assert all(word in out for word in ("--clients", "--steps", "--json", "--config FILE"))
    assert "advise" in COMMANDS
