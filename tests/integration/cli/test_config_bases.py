"""Configs with a base resolve as if they were written out; groups of arguments are set with dotted keys."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import lightning_fed.configs
from lightning_fed.cli import main
from lightning_fed.datamodules.femnist import Pixels, Selection, Source, Split

CONFIGS = Path(lightning_fed.configs.__file__).parent

#: the configs as they were before they had bases, without comments
WHOLE = """
seed_everything: 0
trainer:
  max_epochs: 100
  accelerator: cpu
  default_root_dir: runs/{name}
  {validation}
  logger:
    class_path: lightning_fed.tracking.AutoWandbLogger
    init_args:
      project: lightning-fed
      name: {name}
      save_dir: ${{trainer.default_root_dir}}
  callbacks:
    - class_path: pytorch_lightning.callbacks.ModelCheckpoint
      init_args:
        dirpath: ${{trainer.default_root_dir}}/checkpoints
        save_last: true
        {every}
        enable_version_counter: false
    {confusion}
model: {model}
data: {data}
federated:
  algorithm:
    class_path: lightning_fed.algorithms.{algorithm}
    init_args: {{{eta}: 1.0, alpha: 1.0, start: local}}
  clients_per_round: 10
  local_steps: 300
"""
SYNTHETIC = {
    "validation": "",
    "every": "",
    "confusion": "",
    "model": "{class_path: lightning_fed.models.MLP, init_args: {sizes: [60, 32, 10], lr: 0.01}}",
}
FEMNIST = {
    "validation": "limit_val_batches: 0",
    "every": "every_n_epochs: 5",
    "confusion": "- {class_path: lightning_fed.callbacks.Confusion, init_args: "
    "{path: '${trainer.default_root_dir}/confusion.png'}}",
    "model": "{class_path: lightning_fed.models.FemnistCNN, init_args: {lr: 0.01, log_train: false}}",
    "data": "{class_path: lightning_fed.datamodules.FEMNIST, init_args: "
    "{path: null, writers: 30, seed: '${seed_everything}', batch_size: 2}}",
}
ALGORITHMS = {"fedadmm": {"algorithm": "FedADMM", "eta": "eta"}, "feddr": {"algorithm": "FedDR", "eta": "eta_hat"}}
A = {"synthetic": 1.0, "synthetic_0.5_0.5": 0.5, "synthetic_0_0": 0.0}


@pytest.fixture(autouse=True)
def _arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator


def whole(name: str) -> str:
    data, algorithm = name.rsplit("_", 1)
    if data == "femnist":
        return WHOLE.format(name=name, **FEMNIST, **ALGORITHMS[algorithm])
    init_args = f"{{a: {A[data]}, b: '${{data.init_args.a}}', seed: '${{seed_everything}}', batch_size: 2}}"
    synthetic = f"{{class_path: lightning_fed.datamodules.Synthetic, init_args: {init_args}}}"
    return WHOLE.format(name=name, data=synthetic, **SYNTHETIC, **ALGORITHMS[algorithm])


def printed(config: Path, capsys: pytest.CaptureFixture[str], *args: str) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        main(["fit", "--config", str(config), *args, "--print_config"])
    assert stop.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


@pytest.mark.parametrize("name", [f"{data}_{a}" for data in (*A, "femnist") for a in ALGORITHMS])
def test_a_config_resolves_as_it_did_before_it_had_a_base(
    name: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    former = tmp_path / "former.yaml"
    former.write_text(whole(name))
    assert printed(CONFIGS / f"{name}.yaml", capsys) == printed(former, capsys)


def test_all_configs_are_compared() -> None:
    never_without = ("cifar", "shakespeare", "sent140", "celeba", "synthetic_logistic")
    former = {path.stem for path in CONFIGS.glob("*.yaml") if not path.stem.startswith(never_without)}
    assert former == {f"{d}_{a}" for d in (*A, "femnist") for a in ALGORITHMS}


def test_a_base_may_have_a_base_elsewhere_and_the_command_line_wins(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / "sub" / "middle.yaml").write_text(
        f"base: {CONFIGS}/synthetic_feddr.yaml\ndata: {{init_args: {{a: 3}}}}"
    )
    (tmp_path / "own.yaml").write_text("base: sub/middle.yaml\nfederated: {local_steps: 7, clients_per_round: 5}")
    found = printed(tmp_path / "own.yaml", capsys, "--federated.clients_per_round=4")
    assert (found["data"]["init_args"]["a"], found["data"]["init_args"]["b"]) == (3.0, 3.0)
    assert (found["federated"]["local_steps"], found["federated"]["clients_per_round"]) == (7, 4)


def test_another_class_does_not_inherit_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    own = tmp_path / "own.yaml"
    own.write_text(f"base: {CONFIGS}/synthetic_fedadmm.yaml\nfederated: {{algorithm: {{class_path: FedAvg}}}}")
    algorithm = printed(own, capsys)["federated"]["algorithm"]
    assert algorithm["class_path"].endswith("FedAvg")
    assert "eta" not in algorithm["init_args"]


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    with pytest.raises(SystemExit) as stop:
        main([*args, "--trainer.logger=false"], run=False)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("base: nowhere.yaml", "base 'nowhere.yaml' of"),
        ("base: own.yaml", "own.yaml: this config is its own base"),
        ("base: [a, b]", r"own.yaml: base must be the path of a YAML file, got ['a', 'b']"),
    ],
)
def test_a_base_that_cannot_be_read_is_refused(
    content: str, message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "own.yaml").write_text(content)
    assert message in refused(capsys, "--config", str(tmp_path / "own.yaml"))


# -- groups of arguments ------------------------------------------------------------------------------------------


def femnist(*args: str) -> Any:
    config = str(CONFIGS / "femnist_fedadmm.yaml")
    return main(["--config", config, "--trainer.logger=false", "--data.path=x", *args], run=False).datamodule


def test_dotted_keys_set_single_options_of_a_group() -> None:
    data = femnist("--data.selection.min_samples=100", "--data.init_args.selection.core=true", "--data.split=user")
    assert (data.selection, data.split) == (Selection(core=True, min_samples=100), Split("user"))
    data = femnist("--data.split.train_fraction=0.5", "--data.source.kind=leaf", "--data.source.cache_dir=here")
    assert (data.split, data.source) == (Split("auto", 0.5), Source("leaf", cache_dir="here"))
    data = femnist("--data.pixels.dtype=float64", "--data.eval_batch_size=7", "--data.drop_last=true")
    assert (data.pixels, data.batch_size) == (Pixels(dtype="float64"), 2)
    assert (data.eval_batch_size, data.drop_last) == (7, True)


def test_a_group_is_a_mapping_in_a_config(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text(
        "data: {init_args: {selection: {min_samples: 3}, split: {by: user, train_fraction: 0.5}}}"
    )
    data = femnist("--config", str(tmp_path / "more.yaml"), "--data.selection.fraction=0.5")
    assert (data.selection, data.split) == (Selection(fraction=0.5, min_samples=3), Split("user", 0.5))


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--data.selection.smallest=100", "unrecognized arguments: --selection.smallest"),
        ("--data.selection.min_samples=-1", "Selection.min_samples must be a whole number >= 0, got -1"),
        ("--data.split.by=writer", "Got value: writer"),
        ("--data.split.train_fraction=2.0", "Split.train_fraction must be positive and at most 1, got 2.0"),
        ("--data.min_samples=3", "min_samples"),
    ],
)
def test_a_wrong_option_of_a_group_is_named(option: str, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        femnist(option)
    assert stop.value.code == 2
    assert message in capsys.readouterr().err.split("error:")[-1]
