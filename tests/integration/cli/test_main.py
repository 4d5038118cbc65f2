"""`lightning-fed fit|validate|test --config ...`: every config runs, overrides propagate, errors can be read."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import wandb
import yaml
from helpers.leaf_files import write_some
from helpers.wandb_reader import read_run

import lightning_fed.configs
from lightning_fed.algorithms import FedADMM, FedDR
from lightning_fed.cli import FederatedCLI, main, run
from lightning_fed.datamodules import FEMNIST, Synthetic, Vision
from lightning_fed.models import MLP, CelebaCNN, FemnistCNN, LogisticRegression, Sent140LSTM, ShakespeareLSTM
from lightning_fed.sampling import Uniform

CONFIGS = sorted(Path(lightning_fed.configs.__file__).parent.glob("*.yaml"))
#: of images that torchvision downloads, and of LEAF's models; the others have the paper's settings
IMAGES = [path for path in CONFIGS if path.stem.startswith("cifar")]
LEAFS = [path for path in CONFIGS if path.stem.startswith(("shakespeare", "sent140", "celeba", "synthetic_logistic"))]
PAPERS = [path for path in CONFIGS if path not in (*IMAGES, *LEAFS)]
DEFAULT = next(path for path in CONFIGS if path.name == "synthetic_fedadmm.yaml")
SMALL = [
    *("--data.init_args.clients=3", "--federated.clients_per_round=2", "--federated.local_steps=2"),
    *("--trainer.max_epochs=1", "--trainer.enable_progress_bar=false", "--trainer.enable_model_summary=false"),
]
FOLDERS = ("WANDB_CACHE_DIR", "WANDB_CONFIG_DIR", "WANDB_DATA_DIR", "WANDB_ARTIFACT_DIR")


@pytest.fixture(autouse=True)
def _offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "argv", ["lightning-fed"])  # Lightning warns where both args and sys.argv are given
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator
    monkeypatch.setenv("WANDB_MODE", "offline")
    for name in FOLDERS:
        monkeypatch.setenv(name, str(tmp_path / name.lower()))
    yield
    wandb.finish()


def cli(*args: str, config: Path = DEFAULT, command: str = "fit", **kwargs: Any) -> FederatedCLI:
    return main([command, "--config", str(config), *args], **kwargs)


def small(*args: str, **kwargs: Any) -> FederatedCLI:
    """One round of two clients and two steps; without a logger unless it is asked for."""
    logger = [] if any(arg.startswith("--trainer.logger") for arg in args) else ["--trainer.logger=false"]
    return cli(*SMALL, *logger, *args, **kwargs)


def parsed(*args: str, **kwargs: Any) -> FederatedCLI:
    """Everything is built, nothing is run."""
    kwargs = {"run": False, **kwargs}
    config = kwargs.pop("config", DEFAULT)
    return main(["--config", str(config), "--trainer.logger=false", *args], **kwargs)


def printed(capsys: pytest.CaptureFixture[str], *args: str, config: Path = DEFAULT) -> dict[str, Any]:
    with pytest.raises(SystemExit) as stop:
        cli(*args, "--print_config", config=config)
    assert stop.value.code in (0, None)
    return yaml.safe_load(capsys.readouterr().out)


# -- the configs ------------------------------------------------------------------------------------------------


def test_there_are_configs_for_both_algorithms_on_the_three_sets() -> None:
    found = set()
    for path in PAPERS:
        config = yaml.safe_load(path.read_text())
        data = config["data"]["init_args"]["a"] if "data" in config else "femnist"
        found.add((data, config["federated"]["algorithm"]["class_path"].split(".")[-1]))
    assert found >= {(data, algorithm) for data in (0.0, 0.5, 1.0, "femnist") for algorithm in ("FedADMM", "FedDR")}


@pytest.mark.parametrize("config", PAPERS, ids=lambda path: path.stem)
def test_every_config_is_printed_as_yaml_with_the_papers_settings(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = printed(capsys, config=config)
    assert {"trainer", "model", "data", "federated", "seed_everything"} <= content.keys()
    data, federated = content["data"]["init_args"], content["federated"]
    assert data.get("a") == data.get("b")
    clients = data["clients"] if "clients" in data else data["writers"]
    assert (clients, data["batch_size"], content["model"]["init_args"]["lr"]) == (30, 2, 0.01)
    assert (federated["clients_per_round"], federated["local_steps"]) == (10, 300)
    assert content["trainer"]["max_epochs"] == 100
    algorithm = federated["algorithm"]["init_args"]
    assert algorithm.get("eta", algorithm.get("eta_hat")) == algorithm["alpha"] == 1.0


@pytest.mark.parametrize("config", PAPERS, ids=lambda path: path.stem)
def test_every_config_completes_a_fast_dev_run(config: Path) -> None:
    done = cli("--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false", config=config)
    assert done.trainer.state.finished
    assert done.trainer.global_step == 1
    femnist = config.stem.startswith("femnist")
    assert isinstance(done.model, FemnistCNN if femnist else MLP)
    assert isinstance(done.datamodule, FEMNIST if femnist else Synthetic)


def test_all_other_configs_are_of_images_and_of_leafs_models() -> None:
    assert {path.stem for path in IMAGES} == {"cifar10_fedadmm", "cifar10_fedavg", "cifar100_resnet_fedadmm"}
    leafs = {"shakespeare_fedavg", "sent140_fedavg", "celeba_fedadmm", "synthetic_logistic_fedadmm"}
    assert {path.stem for path in LEAFS} == leafs


@pytest.mark.parametrize("config", LEAFS, ids=lambda path: path.stem)
def test_every_config_of_leafs_models_completes_a_fast_dev_run_on_files_in_leafs_format(
    config: Path, tmp_path: Path
) -> None:
    name = config.stem.split("_")[0]
    quick = ["--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false", "--federated.clients_per_round=2"]
    if name != "synthetic":
        quick += [f"--data.folder={write_some(name, tmp_path / name)}", "--data.batch_size=2"]
    done = cli(*quick, config=config)
    assert done.trainer.state.finished
    assert done.trainer.global_step == 1
    models = {"shakespeare": ShakespeareLSTM, "sent140": Sent140LSTM, "celeba": CelebaCNN}
    assert type(done.model) is models.get(name, LogisticRegression)
    if name != "synthetic":
        assert done.datamodule.description.startswith(f"LEAF's {name} (3 clients")


def test_the_vocabulary_of_tweets_follows_the_model() -> None:
    config = next(path for path in LEAFS if path.stem == "sent140_fedavg")
    built = parsed("--model.words=77", config=config)
    assert (built.model.words, built.datamodule.words) == (77, 77)


@pytest.mark.parametrize("config", IMAGES, ids=lambda path: path.stem)
def test_every_config_of_images_completes_a_fast_dev_run_on_fake_images(
    config: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = printed(capsys, config=config)
    assert content["data"]["init_args"]["dataset"] == config.stem.split("_")[0].upper()
    classes = content["model"]["init_args"]["classes"]
    fake = f"{{size: 120, image_size: [3, 32, 32], num_classes: {classes}}}"
    few = [
        "--federated.clients_per_round=2",
        "--data.partition.clients=3",
        "--data.partition.min_examples=5",
        "--data.batch_size=2",
    ]
    quick = ["--trainer.fast_dev_run=true", "--trainer.enable_progress_bar=false", "--data.eval_batch_size=2"]
    done = cli("--data.dataset=FakeData", f"--data.options={fake}", *few, *quick, config=config)
    assert done.trainer.state.finished
    assert isinstance(done.datamodule, Vision)
    assert done.datamodule.description.startswith("FakeData (3 clients")


@pytest.mark.parametrize("options", [[], ["--trainer.callbacks=null"]], ids=["config", "defaults"])
def test_a_fast_dev_run_leaves_no_checkpoint_to_resume_from(options: list[str], tmp_path: Path) -> None:
    small(*options, "--trainer.fast_dev_run=true")
    assert [path.name for path in tmp_path.rglob("*.ckpt")] == []


def test_what_is_printed_can_be_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    content = printed(capsys, *SMALL, "--trainer.logger=false", "--federated.algorithm.eta=0.5")
    (tmp_path / "printed.yaml").write_text(yaml.safe_dump(content))
    done = cli(config=tmp_path / "printed.yaml")
    assert done.trainer.global_step == 1
    assert done.config_init["fit"]["federated"].algorithm == FedADMM(eta=0.5, start="local")


# -- overrides and interpolation --------------------------------------------------------------------------------


@pytest.mark.parametrize("option", ["--federated.algorithm.eta=0.5", "--federated.algorithm.init_args.eta=0.5"])
def test_an_override_reaches_the_algorithm(option: str) -> None:
    assert parsed(option).config_init["federated"].algorithm == FedADMM(eta=0.5, start="local")


def test_the_callback_of_the_trainer_is_the_one_of_the_config() -> None:
    built = parsed("--federated.algorithm.eta=0.5")
    assert built.config_init["federated"] in built.trainer.callbacks


def test_another_algorithm_can_be_chosen_by_its_name() -> None:
    built = parsed("--federated.algorithm=FedDR", "--federated.algorithm.eta_hat=0.25")
    assert built.config_init["federated"].algorithm == FedDR(eta_hat=0.25, start="local")


def test_a_regulariser_can_be_chosen_by_its_name() -> None:
    built = parsed("--federated.algorithm.g=L1", "--federated.algorithm.g.c=0.01")
    assert built.config_init["federated"].algorithm.g(torch.ones(3)) == pytest.approx(0.03)


def test_a_sampler_can_be_chosen_instead_of_a_number() -> None:
    built = parsed("--federated.clients_per_round=null", "--federated.sampler=Uniform", "--federated.sampler.size=7")
    assert built.config_init["federated"].sampler == Uniform(7)


@pytest.mark.parametrize("option", ["--data.init_args.a=0.5", "--data.a=0.5"])
def test_overriding_a_propagates_to_b(option: str) -> None:
    data = parsed(option).datamodule
    assert (data.a, data.b) == (0.5, 0.5)


def test_overriding_b_leaves_a(capsys: pytest.CaptureFixture[str]) -> None:
    data = parsed("--data.init_args.b=0.25").datamodule
    assert (data.a, data.b) == (1.0, 0.25)


def test_the_seed_propagates_to_the_data_and_the_federation() -> None:
    built = parsed("--seed_everything=7")
    assert built.datamodule.seed == 7
    assert built.config_init["federated"].seed == 7


def test_the_root_folder_propagates_to_checkpoints_and_logger(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    content = printed(capsys, f"--trainer.default_root_dir={tmp_path / 'here'}")
    assert content["trainer"]["logger"]["init_args"]["save_dir"] == str(tmp_path / "here")
    assert content["trainer"]["callbacks"][0]["init_args"]["dirpath"] == str(tmp_path / "here" / "checkpoints")


def test_a_later_config_overrides_an_earlier_one(tmp_path: Path) -> None:
    (tmp_path / "more.yaml").write_text("data:\n  init_args:\n    a: 0.25\nfederated:\n  local_steps: 7\n")
    built = main(
        ["--config", str(DEFAULT), "--config", str(tmp_path / "more.yaml"), "--trainer.logger=false"], run=False
    )
    assert (built.datamodule.a, built.datamodule.b) == (0.25, 0.25)
    assert built.config_init["federated"].local_steps == 7


# -- fit, validate, test ----------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")  # has its own test
def test_fit_then_validate_and_test(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = f"--trainer.default_root_dir={tmp_path / 'run'}"
    fitted = small(root)
    last = tmp_path / "run" / "checkpoints" / "last.ckpt"
    assert last.is_file()
    for command, name in (("validate", "val_loss"), ("test", "test_loss")):
        done = small(root, "--ckpt_path", str(last), command=command)
        assert done.trainer.state.finished
        assert name in done.trainer.callback_metrics
        weights = done.model.state_dict()
        assert all(torch.equal(weights[k], value) for k, value in fitted.model.state_dict().items())
        assert name in capsys.readouterr().out


def test_a_test_without_a_checkpoint_says_that_the_model_is_untrained(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        small(command="test")
    assert "test without --ckpt_path takes the model as its class makes it" in caplog.text


def test_a_checkpoint_is_validated_without_a_warning_about_our_own_callbacks(tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path / 'run'}"
    small(root)
    small(root, f"--ckpt_path={tmp_path / 'run' / 'checkpoints' / 'last.ckpt'}", command="validate")


def test_a_fit_is_resumed_from_its_last_checkpoint(tmp_path: Path) -> None:
    root = f"--trainer.default_root_dir={tmp_path / 'run'}"
    small(root)
    resumed = small(root, "--trainer.max_epochs=3", "--ckpt_path=last")
    whole = small(f"--trainer.default_root_dir={tmp_path / 'whole'}", "--trainer.max_epochs=3")
    assert resumed.trainer.global_step == 3
    assert torch.equal(*(next(iter(c.model.parameters())).detach() for c in (resumed, whole)))


@pytest.mark.parametrize("command", ["test", "validate", "predict"])
def test_the_last_checkpoint_of_no_fit_is_refused(
    command: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Lightning would warn, and measure the untrained model."""
    with pytest.raises(SystemExit) as stop:
        small(f"--trainer.default_root_dir={tmp_path / 'run'}", "--ckpt_path=last", command=command)
    assert stop.value.code == 2
    assert "ckpt_path: there is no last checkpoint" in capsys.readouterr().err


def test_a_second_run_into_the_same_folder_does_not_abort(tmp_path: Path) -> None:
    options = ["--trainer.logger.project=test", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    for _ in range(2):
        assert small(*options).trainer.state.finished
        wandb.finish()
    assert len(list((tmp_path / "run").glob("wandb/offline-run-*"))) == 2


def test_the_resolved_config_is_written_and_can_be_run_again(tmp_path: Path) -> None:
    first = small(f"--trainer.default_root_dir={tmp_path / 'run'}", "--data.init_args.a=0.5")
    written = tmp_path / "run" / "config.yaml"
    content = yaml.safe_load(written.read_text())
    assert content["data"]["init_args"]["b"] == 0.5
    assert content["federated"]["local_steps"] == 2
    again = cli(config=written)
    assert torch.equal(*(next(iter(c.model.parameters())).detach() for c in (first, again)))


def test_a_fast_dev_run_writes_no_config(tmp_path: Path) -> None:
    small(f"--trainer.default_root_dir={tmp_path / 'run'}", "--trainer.fast_dev_run=true")
    assert not (tmp_path / "run" / "config.yaml").exists()


@pytest.fixture
def logged_config(tmp_path: Path) -> dict[str, Any]:
    options = ["--trainer.logger.project=test", f"--trainer.default_root_dir={tmp_path / 'run'}"]
    small(*options, "--data.init_args.a=0.5", "--federated.algorithm.eta=0.5", "--federated.figure=false")
    wandb.finish()
    return read_run(tmp_path / "run").config


def test_the_resolved_config_is_logged(logged_config: dict[str, Any], tmp_path: Path) -> None:
    assert logged_config["data"]["init_args"]["b"] == 0.5
    assert logged_config["trainer"]["max_epochs"] == 1
    assert logged_config["trainer"]["default_root_dir"] == str(tmp_path / "run")
    assert logged_config["model"]["class_path"].endswith("MLP")
    assert "eta" in str(logged_config["federated"]["algorithm"])


def test_the_config_does_not_hide_the_settings_of_the_federation(logged_config: dict[str, Any]) -> None:
    settings = logged_config["federated"]
    assert settings.get("clients") == 3, "as from Python: see equip.settings_of"
    assert settings["seed"] == 0, "the seed that is used, not the option that was left open"
    assert settings["algorithm"].get("name") == "FedADMM"


# -- errors -----------------------------------------------------------------------------------------------------


def refused(capsys: pytest.CaptureFixture[str], *args: str) -> str:
    """What is printed when the command line stops with status 2."""
    with pytest.raises(SystemExit) as stop:
        parsed(*args)
    assert stop.value.code == 2
    return capsys.readouterr().err


@pytest.mark.parametrize(
    ("option", "named"),
    [
        ("--federated.algorithm=FedFoo", "FedFoo"),
        ("--federated.algorithm.eta=large", "eta"),
        ("--federated.algorithm.etta=1.0", "etta"),
        ("--federated.buffers=mine", "buffers"),
        ("--config=nowhere.yaml", "nowhere.yaml"),
        ("--data=lightning_fed.models.MLP", "lightning_fed.models.MLP"),
    ],
)
def test_what_cannot_be_parsed_is_named(option: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = refused(capsys, option)
    assert named in error.split("error:")[-1]
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("option", "message"),
    [
        ("--federated.algorithm.eta=-0.1", "FedADMM.eta must be positive, got -0.1"),
        ("--federated.local_steps=0", "FederatedServer.local_steps must be a whole number >= 1, got 0"),
        ("--data.init_args.b=-1.0", "Synthetic.b must be non-negative, got -1.0"),
    ],
)
def test_a_wrong_value_is_an_error_of_the_command_line(
    option: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, option)


def test_more_clients_per_round_than_there_are_is_a_readable_error() -> None:
    with pytest.raises(ValueError, match="Cannot draw 9 clients per round: the federation has 3"):
        small("--federated.clients_per_round=9")


# -- entry points -----------------------------------------------------------------------------------------------


def test_the_entry_point_returns_nothing_as_exit_status(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    options = [*SMALL, "--trainer.fast_dev_run=true", "--trainer.logger=false"]
    monkeypatch.setattr(sys, "argv", ["lightning-fed", "fit", "--config", str(DEFAULT), *options])
    assert run() is None


def test_help_is_printed_by_the_module_and_by_the_script() -> None:
    commands = [[sys.executable, "-m", "lightning_fed"], [str(Path(sys.executable).with_name("lightning-fed"))]]
    running = [
        subprocess.Popen([*command, "--help"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for command in commands
    ]
    for process in running:
        out, err = process.communicate(timeout=120)
        assert process.returncode == 0, err
        assert "usage: lightning-fed" in out
        assert all(word in out for word in ("fit", "validate", "test", "--config"))


def test_an_older_config_of_another_run_is_kept(tmp_path: Path) -> None:
    from lightning_fed.cli.main import _keep

    for text in ("a: 1", "a: 2", "a: 1"):
        _keep(tmp_path, text)
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {
        "config.yaml": "a: 1",
        "config-v1.yaml": "a: 2",
    }


def test_classes_go_by_their_short_names(capsys: pytest.CaptureFixture[str]) -> None:
    args = ["fit", "--model=MLP", "--data=Synthetic", "--federated.algorithm=FedDR", "--federated.algorithm.g=L1"]
    with pytest.raises(SystemExit) as done:
        main([*args, "--print_config"])
    assert done.value.code == 0
    assert "class_path: lightning_fed.prox.L1" in capsys.readouterr().out
