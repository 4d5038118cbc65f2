"""W&B offline without a key, online with one, silent when disabled; and the reader of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import wandb
from helpers.modules import Net, classification, quiet_trainer
from helpers.wandb_reader import BLOCK, read_run, wandb_at
from pytorch_lightning.loggers import WandbLogger

from lightning_fed.algorithms import FedADMM
from lightning_fed.tracking import AutoWandbLogger, has_wandb_key

ROUNDS, CLIENTS, COHORT, STEPS, ETA = 3, 5, 2, 3, 2.0
KEY = "0" * 40


@pytest.fixture
def own_wandb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    wandb_at(monkeypatch, tmp_path)
    yield tmp_path
    wandb.finish()


@pytest.fixture
def keyless(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    monkeypatch.delenv("WANDB_MODE", raising=False)
    monkeypatch.delenv("WANDB_API_KEY", raising=False)
    monkeypatch.setenv("NETRC", str(tmp_path / "netrc"))
    return monkeypatch


def test_without_a_key_the_logger_is_offline(keyless: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert AutoWandbLogger(save_dir=str(tmp_path / "new" / "folder"))._offline
    assert (tmp_path / "new" / "folder").is_dir()


def test_with_a_key_in_the_environment_the_logger_is_online(keyless: pytest.MonkeyPatch) -> None:
    keyless.setenv("WANDB_API_KEY", KEY)
    assert not AutoWandbLogger()._offline


@pytest.mark.parametrize("host", ["api.wandb.ai", "company.wandb.io"])
def test_with_a_key_in_netrc_the_logger_is_online(keyless: pytest.MonkeyPatch, tmp_path: Path, host: str) -> None:
    (tmp_path / "netrc").write_text(f"machine {host}\n  login user\n  password {KEY}\n")
    assert not AutoWandbLogger()._offline


def test_keys_of_others_in_netrc_do_not_count(keyless: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text(f"machine github.com\n  login user\n  password {KEY}\n")
    assert AutoWandbLogger()._offline


def test_a_broken_netrc_does_not_stop_the_run(keyless: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "netrc").write_text("machine\n")
    assert AutoWandbLogger()._offline


@pytest.mark.parametrize("mode", ["offline", "dryrun", "disabled"])
def test_a_mode_in_the_environment_beats_the_key(keyless: pytest.MonkeyPatch, mode: str) -> None:
    keyless.setenv("WANDB_API_KEY", KEY)
    keyless.setenv("WANDB_MODE", mode)
    assert not has_wandb_key()


def test_a_mode_in_the_environment_beats_the_missing_key(keyless: pytest.MonkeyPatch) -> None:
    keyless.setenv("WANDB_MODE", "online")
    assert not AutoWandbLogger()._offline


def test_the_host_of_a_server_of_ones_own_is_looked_up_in_netrc(keyless: pytest.MonkeyPatch, tmp_path: Path) -> None:
    keyless.setenv("WANDB_BASE_URL", "https://tracking.company.com")
    (tmp_path / "netrc").write_text(f"machine tracking.company.com\n  login user\n  password {KEY}\n")
    assert not AutoWandbLogger()._offline


@pytest.mark.parametrize("offline", [True, False])
def test_the_users_own_choice_beats_everything(keyless: pytest.MonkeyPatch, offline: bool) -> None:
    keyless.setenv("WANDB_API_KEY", KEY)
    assert AutoWandbLogger(offline=offline)._offline is offline
    keyless.delenv("WANDB_API_KEY")
    assert AutoWandbLogger(offline=offline)._offline is offline


@pytest.fixture
def disabled_wandb(own_wandb: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    wandb.teardown()  # it reads the environment only once
    monkeypatch.setenv("WANDB_MODE", "disabled")
    yield own_wandb
    wandb.finish()
    wandb.teardown()


def test_a_disabled_wandb_writes_no_run(disabled_wandb: Path) -> None:
    AutoWandbLogger(save_dir=str(disabled_wandb / "run")).log_metrics({"a": 1.0}, step=0)
    wandb.finish()
    assert list(disabled_wandb.rglob("*.wandb")) == []


def test_the_automatic_logger_records_a_federated_fit(own_wandb: Path) -> None:
    trainer = quiet_trainer(FedADMM(), 1, logger=AutoWandbLogger(save_dir=str(own_wandb / "run"), name="auto"))
    trainer.fit(Net(), datamodule=classification(2))
    wandb.finish()
    run = read_run(own_wandb / "run")
    assert list(run.series("federated/objective")) == [0]
    assert run.config["federated"]["algorithm"]["name"] == "FedADMM"


# -- the reader -------------------------------------------------------------------------------------------------


def test_the_reader_joins_records_that_span_blocks(own_wandb: Path) -> None:
    (own_wandb / "run").mkdir(exist_ok=True)  # or W&B 0.17 writes to the system's folder for temporary files
    logger = WandbLogger(save_dir=str(own_wandb / "run"), offline=True)
    long = {f"n{i}": "x" * (BLOCK - 100 + i * BLOCK // 3) for i in range(6)}
    for name, text in long.items():
        logger.experiment.log({name: text})
    wandb.finish()
    run = read_run(own_wandb / "run")
    assert {k: v for row in run.history for k, v in row.items() if k in long} == long
