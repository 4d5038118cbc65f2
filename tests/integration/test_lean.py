"""The lean step gives bitwise the numbers of Lightning's own optimisation loop, and steps aside where hooks matter."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.profilers import SimpleProfiler
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.trainer.eligibility import why_not_hookless as why_not


class Listener(pl.Callback):
    """Does nothing, but has to be called."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


class Reason(pl.Callback):
    """What stood in the way of the lean step."""

    found: str | None = "never asked"

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.found = why_not(trainer)


def run(module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any) -> tuple[dict[str, Tensor], str | None]:
    server = FederatedServer(FedADMM(eta=1.0), clients_per_round=2, local_steps=4, engine="sequential")
    reason = Reason()
    trainer = quiet_trainer(server, 3, callbacks=[reason, *callbacks], **kwargs)
    trainer.fit(module, datamodule=classification(drop_last=True))
    timeless = {k: v for k, v in trainer.callback_metrics.items() if k != "federated/seconds"}
    return {**module.state_dict(), **timeless}, reason.found


class DictLoss(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return {"loss": super().training_step(batch, batch_idx), "more": 1}


class SometimesNone(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize(
    ("kind", "model", "options"),
    [
        (Net, {}, {}),
        (Net, {"optimizer": "momentum", "dropout": 0.5}, {"gradient_clip_val": 0.1}),
        (Net, {"optimizer": "adam", "norm": True}, {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"}),
        (Net, {"scheduler": "step"}, {}),
        (Net, {"scheduler": "epoch"}, {"precision": "64-true"}),
        (Net, {}, {"precision": "bf16-mixed"}),
        (Net, {}, {"precision": "bf16-true"}),
        (DictLoss, {}, {}),
        (SometimesNone, {}, {}),
    ],
    ids=str,
)
def test_lean_and_full_steps_give_the_same_bits(kind: Any, model: dict[str, Any], options: dict[str, Any]) -> None:
    lean, reason = run(kind(**model), **options)
    full, other = run(kind(**model), Listener(), **options)
    assert reason is None
    assert other == "Listener overrides on_after_backward"
    assert lean.keys() == full.keys()
    assert [name for name in lean if not torch.equal(lean[name], full[name])] == []


class Hooked(Net):
    def on_before_zero_grad(self, optimizer: Any) -> None:
        pass


class Manual(Net):
    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        loss, optimizer = super().training_step(batch, batch_idx), self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@pytest.mark.parametrize(
    ("module", "options", "reason"),
    [
        (Hooked, {}, "Hooked overrides on_before_zero_grad"),
        (Manual, {}, "optimisation is manual"),
        (Net, {"accumulate_grad_batches": 2}, "gradients are accumulated"),
        (Net, {"profiler": SimpleProfiler(dirpath=".", filename="profile")}, "a profiler listens"),
    ],
    ids=["hook", "manual", "accumulation", "profiler"],
)
def test_lightnings_own_loop_runs_where(module: Any, options: dict[str, Any], reason: str) -> None:
    assert run(module(), **options)[1] == reason
