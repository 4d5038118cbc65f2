"""`examples/sweep.yaml`: what W&B's agent makes of it is a command that runs."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from wandb.sdk.launch.sweeps.utils import create_sweep_command, create_sweep_command_args

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.cli import main

ROOT = Path(__file__).parents[3]


def command_of(sweep: dict[str, Any], chosen: dict[str, Any]) -> list[str]:
    """The command that the agent runs: macros of the sweep's command, replaced by W&B's own functions."""
    macros = create_sweep_command_args({"args": {key: {"value": value} for key, value in chosen.items()}})
    macros |= {"env": ["/usr/bin/env"], "program": [sweep["program"]]}
    words = []
    for word in create_sweep_command(sweep["command"]):
        is_macro = word.startswith("${") and word.endswith("}")
        words += macros[word[2:-1]] if is_macro else [word]
    return words


@pytest.fixture
def sweep(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """The sweep, in a folder with the configs that its command names."""
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")
    monkeypatch.setenv("WANDB_RUN_ID", "run7")  # as the agent does
    shutil.copytree(ROOT / "configs", tmp_path / "configs")
    found: dict[str, Any] = yaml.safe_load((ROOT / "examples" / "sweep.yaml").read_text())
    return found


def test_a_combination_of_the_sweep_runs(sweep: dict[str, Any], tmp_path: Path) -> None:
    chosen = {key: spec["values"][0] if "values" in spec else spec["max"] for key, spec in sweep["parameters"].items()}
    env, program, *args = command_of(sweep, chosen)
    assert (env, program) == ("/usr/bin/env", "lightning-fed")
    assert "--federated.algorithm.init_args.eta=10.0" in args
    done = main([*args, "--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false"])
    assert done is not None
    assert done.trainer.global_step == 1
    server = next(callback for callback in done.trainer.callbacks if isinstance(callback, FederatedServer))
    assert server.algorithm == FedADMM(eta=10.0, start="local")
    assert server.local_steps == 100
    assert done.model.lr == 0.1
    assert done.config["fit"]["trainer"]["default_root_dir"] == "runs/sweep/run7"
    assert sweep["metric"]["name"] in done.trainer.callback_metrics


def test_the_least_and_the_last_values_are_taken_too(sweep: dict[str, Any], capsys: pytest.CaptureFixture[str]) -> None:
    chosen = {key: spec["values"][-1] if "values" in spec else spec["min"] for key, spec in sweep["parameters"].items()}
    with pytest.raises(SystemExit) as stop:
        main([*command_of(sweep, chosen)[2:], "--print_config"])
    assert stop.value.code in (0, None)
    config = yaml.safe_load(capsys.readouterr().out)
    algorithm = config["federated"]["algorithm"]["init_args"]
    assert (algorithm["eta"], algorithm["start"], config["federated"]["local_steps"]) == (0.01, "server", 300)
    assert config["model"]["init_args"]["lr"] == 0.003
