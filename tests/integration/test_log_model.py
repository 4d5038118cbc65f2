"""Checkpoints as artifacts of a tracker: the server's model, and nothing that clients remember."""

from __future__ import annotations

import zipfile
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
import wandb
from helpers.modules import Net, classification, quiet_trainer
from helpers.wandb_reader import Artifact, read_run, wandb_at
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import Logger, WandbLogger
from pytorch_lightning.plugins.io import TorchCheckpointIO
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.core.server_part import OF_THE_FIT
from lightning_fed.tracking import AutoWandbLogger

ROUNDS = 3


@dataclass
class Uploaded:
    """A fit, the folder of its checkpoints, and the models that W&B has of it."""

    trainer: pl.Trainer
    saved: Path
    models: list[Artifact]
    log_model: Any

    def bytes_of_clients(self) -> list[bytes]:
        """What clients remember after the fit, as it would lie in a file."""
        federation = self.trainer.fit_loop.server.federation
        states = [federation.store[cid].state for cid in federation.client_ids]
        return [tensor.numpy().tobytes() for state in states for tensor in parts(state)]


def parts(state: Any) -> list[Tensor]:
    """The vectors of a client's state."""
    found = [getattr(state, part.name) for part in fields(state)]
    return [part for part in found if part.ndim]


def fit(home: Path, logger: Logger, server: FederatedServer | None, **kwargs: Any) -> pl.Trainer:
    save = ModelCheckpoint(home / "saved", monitor="val_loss", save_last=True)
    options = {"logger": logger, "callbacks": [save], "enable_checkpointing": True, "log_every_n_steps": 1, **kwargs}
    trainer = quiet_trainer(server, ROUNDS, **options)
    trainer.fit(Net(seed=1), datamodule=classification(3, val=0.2))
    return trainer


def federation(**kwargs: Any) -> FederatedServer:
    return FederatedServer(FedADMM(eta=2.0), local_steps=2, seed=3, figure=False, **kwargs)


def models(home: Path) -> list[Artifact]:
    wandb.finish()
    return [artifact for artifact in read_run(home).artifacts if artifact.type == "model"]


def holds(path: Path, content: bytes) -> bool:
    with zipfile.ZipFile(path) as archive:
        return any(content in archive.read(name) for name in archive.namelist())


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    wandb_at(monkeypatch, tmp_path)
    yield tmp_path
    wandb.finish()


@pytest.fixture(
    scope="module",
    params=[("auto", True, "memory"), ("auto", "all", "disk"), ("stock", True, "disk"), ("stock", "all", "memory")],
    ids=lambda param: " ".join(map(str, param)),
)
def uploaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Uploaded]:
    kind, log_model, store = request.param
    home = tmp_path_factory.mktemp("home")
    with pytest.MonkeyPatch.context() as patch:
        wandb_at(patch, home)  # no key, and WANDB_MODE=offline for the stock logger, which refuses offline=True
        make = AutoWandbLogger if kind == "auto" else WandbLogger
        logger = make(project="test", save_dir=str(home), log_model=log_model)
        trainer = fit(home, logger, federation(store=store))
        yield Uploaded(trainer, home / "saved", models(home), log_model)


def test_models_are_artifacts_at_the_end_or_whenever_one_is_saved(uploaded: Uploaded) -> None:
    assert {"latest", "best"} == {alias for model in uploaded.models for alias in model.aliases}
    assert [list(model.files) for model in uploaded.models] == [["model.ckpt"]] * len(uploaded.models)
    names = [model.metadata["original_filename"] for model in uploaded.models]
    assert len(names) == len(set(names)) == 2 if uploaded.log_model is True else len(names) > ROUNDS
    assert "last.ckpt" in names
    assert uploaded.models[-1].metadata["ModelCheckpoint"]["monitor"] == "val_loss"


def test_a_model_is_the_servers_and_loads(uploaded: Uploaded) -> None:
    (last,) = [model for model in uploaded.models if model.metadata["original_filename"] == "last.ckpt"][-1:]
    loaded = Net.load_from_checkpoint(last.files["model.ckpt"], weights_only=True)
    assert loaded.hparams["seed"] == 1
    for one, other in zip(loaded.parameters(), uploaded.trainer.lightning_module.parameters(), strict=True):
        assert torch.equal(one, other)


def test_a_model_holds_nothing_that_clients_remember(uploaded: Uploaded) -> None:
    secrets = uploaded.bytes_of_clients()
    assert len(secrets) == 2 * 3, "z_i and x_hat_i of three clients"
    for model in uploaded.models:
        assert not torch.load(model.files["model.ckpt"], weights_only=True).keys() & set(OF_THE_FIT)
        assert not any(holds(model.files["model.ckpt"], secret) for secret in secrets)


def test_the_checkpoint_of_the_fit_holds_what_clients_remember(uploaded: Uploaded) -> None:
    """So that the test above would find it."""
    files = [path for path in uploaded.saved.rglob("*") if path.is_file()]
    assert any(secret in path.read_bytes() for path in files for secret in uploaded.bytes_of_clients())


def test_a_plain_trainer_uploads_its_whole_checkpoint(home: Path) -> None:
    fit(home, AutoWandbLogger("test", str(home), log_model=True), None)
    loaded = torch.load(models(home)[-1].files["model.ckpt"], weights_only=True)
    assert {"optimizer_states", "loops"} <= loaded.keys(), "there are no clients"


class Other(TorchCheckpointIO):
    """A format of its own."""

    def save_checkpoint(self, checkpoint: Any, path: Any, storage_options: Any = None) -> None:
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        Path(path).write_bytes(b"another format")


def test_a_file_from_which_the_model_cannot_be_taken_is_not_uploaded(home: Path) -> None:
    logger = AutoWandbLogger("test", str(home), log_model=True)
    with pytest.warns(UserWarning, match=r"ckpt is not uploaded: it holds what clients remember.*log_model=False"):
        fit(home, logger, federation(), plugins=[Other()])
    assert models(home) == []


def test_nothing_is_copied_where_nothing_is_uploaded(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Path] = []
    monkeypatch.setattr("lightning_fed.tracking.uploads._read", read.append)
    fit(home, AutoWandbLogger("test", str(home)), federation())
    assert models(home) == read == []


class Foreign(Logger):
    """A tracker of which nobody here knows anything; it looks at the callback in its own ways."""

    name, version = "foreign", "1"

    def __init__(self) -> None:
        super().__init__()
        self.found: list[Path] = []

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        """Nothing."""

    def log_hyperparams(self, *args: Any, **kwargs: Any) -> None:
        """Nothing."""

    def after_save_checkpoint(self, checkpoint_callback: ModelCheckpoint) -> None:
        assert isinstance(checkpoint_callback, ModelCheckpoint)
        named = [checkpoint_callback.best_model_path, *checkpoint_callback.best_k_models]
        assert all(path.startswith(checkpoint_callback.dirpath) for path in named)
        self.found = [Path(path) for path in named] + list(Path(checkpoint_callback.dirpath).glob("*"))


def test_an_unknown_tracker_sees_copies_too(home: Path) -> None:
    logger = Foreign()
    fit(home, logger, federation())
    assert logger.found
    assert all("callbacks" not in torch.load(path, weights_only=True) for path in logger.found)


def test_another_value_of_log_model_is_refused(home: Path) -> None:
    with pytest.raises(ValueError, match=r'log_model must be True, False or "all", got \'best\''):
        AutoWandbLogger("test", str(home), log_model="best")
