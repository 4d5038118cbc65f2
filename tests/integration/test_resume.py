"""An interrupted run goes on bitwise as if it had not been interrupted."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import Checkpoint, EarlyStopping, ModelCheckpoint, OnExceptionCheckpoint
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.prox import L1

ROUNDS = 5
MODELS: dict[str, dict[str, Any]] = {
    "momentum": {"optimizer": "momentum"},
    "adam": {"optimizer": "adam"},
    "adagrad": {"optimizer": "adagrad"},
    "dropout": {"dropout": 0.5},
    "batchnorm": {"norm": True},
    "epoch scheduler": {"scheduler": "epoch"},
    "step scheduler": {"scheduler": "step"},
    "plateau scheduler": {"scheduler": "plateau"},
    "everything": {"optimizer": "adam", "dropout": 0.3, "norm": True, "scheduler": "epoch"},
}


class StopRun(Exception):  # noqa: N818
    """Whatever ends a run early."""


class StopAt(FederatedCallback):
    """Fails in the middle of a round, or once a round is over."""

    def __init__(self, round: int, *, inside: bool) -> None:
        self.round, self.inside = round, inside

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        if self.inside and visit.round == self.round and visit.position == 1:
            raise StopRun

    def on_train_epoch_start(self, trainer: pl.Trainer, module: pl.LightningModule) -> None:
        if not self.inside and trainer.current_epoch == self.round:
            raise StopRun


class SaveInsideVisit(FederatedCallback):
    """Saves while a client is at work, when the module holds the client's model."""

    def __init__(self, path: Path, round: int) -> None:
        self.path, self.round = path, round

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        if visit.round == self.round and visit.position == 1:
            trainer.save_checkpoint(self.path)


def everything(trainer: pl.Trainer, module: pl.LightningModule, server: FederatedServer) -> dict[str, Tensor]:
    """All that must be equal in the end: model, buffers, server, every client, optimiser settings."""
    federation = server.federation
    assert federation is not None
    found = {f"model {name}": value for name, value in module.state_dict().items()}
    found |= {f"server {name}": value for name, value in vars(federation.server).items()}
    for cid in sorted(federation.store, key=str):
        memory = federation.store[cid]
        found |= {f"{cid} {name}": value for name, value in vars(memory.state).items()}
        found |= {f"{cid} buffer {name}": value for name, value in memory.buffers.items()}
        found[f"{cid} visits and cost"] = torch.tensor([memory.visits, *astuple(memory.cost)])
    for i, optimizer in enumerate(trainer.optimizers):
        found[f"lr {i}"] = torch.tensor([float(group["lr"]) for group in optimizer.param_groups])
    found["counters"] = torch.tensor(
        [trainer.current_epoch, trainer.global_step, federation.bytes_up, federation.bytes_down]
    )
    return {name: value.clone() for name, value in found.items()}


def assert_same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> None:
    assert ours.keys() == theirs.keys()
    different = [name for name, value in ours.items() if not torch.equal(value, theirs[name])]
    assert not different


def run(
    model: dict[str, Any],
    callbacks: list[pl.Callback] | None = None,
    ckpt_path: Any = None,
    algorithm: Algorithm | None = None,
    buffers: Any = "average",
    **kwargs: Any,
) -> dict[str, Tensor]:
    server = FederatedServer(algorithm or FedADMM(eta=1.0), clients_per_round=2, local_steps=4, seed=3, buffers=buffers)
    checkpointing = any(isinstance(callback, Checkpoint) for callback in callbacks or [])
    trainer = quiet_trainer(server, ROUNDS, callbacks=callbacks or [], enable_checkpointing=checkpointing, **kwargs)
    module = Net(**model)
    trainer.fit(module, datamodule=classification(drop_last=True, val=0.2), ckpt_path=ckpt_path)
    return everything(trainer, module, server)


SAVES: dict[str, Callable[[Path], ModelCheckpoint]] = {
    "end of epoch": lambda path: ModelCheckpoint(path, save_last=True, save_on_train_epoch_end=True),
    "end of validation": lambda path: ModelCheckpoint(path, save_last=True, save_on_train_epoch_end=False),
    "end of batch": lambda path: ModelCheckpoint(path, save_last=True, every_n_train_steps=1),
    "best by metric": lambda path: ModelCheckpoint(path, save_last=True, monitor="val_loss", save_top_k=2),
    "linked last": lambda path: ModelCheckpoint(path, save_last="link"),
}


@pytest.mark.parametrize("model", MODELS.values(), ids=MODELS.keys())
def test_resume_is_bitwise_for(model: dict[str, Any], tmp_path: Path) -> None:
    with pytest.raises(StopRun):
        run(model, [SAVES["end of epoch"](tmp_path), StopAt(3, inside=False)])
    assert_same(run(model, [SAVES["end of epoch"](tmp_path)], ckpt_path="last"), run(model))


@pytest.mark.parametrize(("model", "save"), list(itertools.product(["everything", "plateau scheduler"], SAVES)))
def test_resume_is_bitwise_from_a_save_at(model: str, save: str, tmp_path: Path) -> None:
    with pytest.raises(StopRun):
        run(MODELS[model], [SAVES[save](tmp_path), StopAt(3, inside=True)])
    assert_same(run(MODELS[model], [SAVES[save](tmp_path)], ckpt_path="last"), run(MODELS[model]))


@pytest.mark.parametrize(
    ("algorithm", "buffers"),
    [
        (FedDR(eta_hat=1.0, alpha=1.5, g=L1(1e-3)), "local"),
        (FedDR(init="prox"), "average"),
        (FedADMM(alpha=1.5, weights="samples", start="centre"), "server"),
        (FedAvg(), "average"),
    ],
    ids=str,
)
def test_resume_is_bitwise_with(algorithm: Algorithm, buffers: str, tmp_path: Path) -> None:
    model = MODELS["everything"]
    options = {"algorithm": algorithm, "buffers": buffers}
    with pytest.raises(StopRun):
        run(model, [SAVES["end of epoch"](tmp_path), StopAt(2, inside=True)], **options)
    assert_same(run(model, [SAVES["end of epoch"](tmp_path)], ckpt_path="last", **options), run(model, **options))


@pytest.mark.filterwarnings("ignore:.*fit.ckpt_path=")
def test_resume_is_bitwise_from_a_save_on_exception_in_the_middle_of_a_round(tmp_path: Path) -> None:
    model = MODELS["everything"]
    with pytest.raises(StopRun):
        run(model, [OnExceptionCheckpoint(tmp_path), StopAt(3, inside=True)])
    saved = next(tmp_path.glob("*.ckpt"))
    assert torch.load(saved, weights_only=True)["global_step"] == 3
    assert_same(run(model, ckpt_path=saved), run(model))


def test_a_save_inside_a_visit_holds_the_server_and_resumes_bitwise(tmp_path: Path) -> None:
    model, path = MODELS["everything"], tmp_path / "inside.ckpt"
    end_of_round: dict[int, dict[str, Tensor]] = {}

    class Remember(FederatedCallback):
        def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
            end_of_round[report.round] = {k: v.clone() for k, v in module.state_dict().items()}

    whole = run(model, [SaveInsideVisit(path, round=2), Remember()])
    saved = torch.load(path, weights_only=True)
    assert all(torch.equal(value, end_of_round[1][name]) for name, value in saved["state_dict"].items())
    assert not any(saved["optimizer_states"][0]["state"].values())
    assert_same(run(model, ckpt_path=path), whole)


@pytest.mark.parametrize("save", ["end of epoch", "end of validation", "end of batch"])
def test_resume_is_bitwise_when_steps_limit_the_run(save: str, tmp_path: Path) -> None:
    model, limits = MODELS["plateau scheduler"], {"max_epochs": -1, "max_steps": ROUNDS}
    with pytest.raises(StopRun):
        run(model, [SAVES[save](tmp_path), StopAt(3, inside=False)], **limits)
    assert_same(run(model, [SAVES[save](tmp_path)], ckpt_path="last", **limits), run(model, **limits))


def test_resume_is_bitwise_from_a_checkpoint_callback_that_saves_on_exception(tmp_path: Path) -> None:
    model = MODELS["everything"]

    def save() -> ModelCheckpoint:
        return ModelCheckpoint(tmp_path, "{step}", every_n_epochs=10, save_on_exception=True)

    with pytest.raises(StopRun):
        run(model, [save(), StopAt(3, inside=True)])
    assert_same(run(model, [save()], ckpt_path=tmp_path / "step=3.ckpt"), run(model))


def test_resume_after_the_last_round_runs_more_rounds_when_asked(tmp_path: Path) -> None:
    model = MODELS["everything"]
    run(model, [SAVES["end of epoch"](tmp_path)], max_epochs=3)
    assert_same(run(model, [SAVES["end of epoch"](tmp_path)], ckpt_path="last"), run(model))


def test_resume_does_not_count_a_round_twice_for_early_stopping(tmp_path: Path) -> None:
    def stopped_at(ckpt_path: Any = None, callbacks: list[pl.Callback] | None = None) -> int:
        patience = EarlyStopping("val_loss", patience=3, min_delta=100.0)
        ends = run({}, [patience, SAVES["end of validation"](tmp_path), *(callbacks or [])], ckpt_path, max_epochs=20)
        return int(ends["counters"][1])

    whole = stopped_at()
    with pytest.raises(StopRun):
        stopped_at(callbacks=[StopAt(2, inside=True)])
    assert stopped_at("last") == whole == 4


def test_the_trainers_own_checkpoint_can_be_resumed_from(tmp_path: Path) -> None:
    server = FederatedServer(FedADMM(), clients_per_round=2, local_steps=2)
    trainer = quiet_trainer(server, 2, enable_checkpointing=True, default_root_dir=tmp_path)
    module = Net()
    trainer.fit(module, datamodule=classification())
    trainer.fit_loop.max_epochs = 4
    trainer.fit(module, datamodule=classification(), ckpt_path="last")
    assert trainer.global_step == 4


def test_a_checkpoint_holds_only_tensors_and_plain_values(tmp_path: Path) -> None:
    run(MODELS["everything"], [SAVES["end of epoch"](tmp_path)])
    torch.load(tmp_path / "last.ckpt", weights_only=True)
