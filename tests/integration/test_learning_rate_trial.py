"""A trial of learning rates finds the best, and a fit that goes on after it has the bits of one without."""

from __future__ import annotations

import math
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.cli.advising.trial import LearningRateTrial, TrialResult, Tried, neighbours
from lightning_fed.datamodules import Synthetic


class Warming(pl.LightningModule):
    """BatchNorm, dropout, Adam, a warm-up by step from 0, and a metric that is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(60, 8), nn.BatchNorm1d(8), nn.Dropout(0.1), nn.Linear(8, 10))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = nn.functional.cross_entropy(self.net(batch[0]), batch[1])
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=0.01)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, step / 20))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Trying(pl.Callback):
    def __init__(self) -> None:
        self.lines: list[str] = []
        self.found: TrialResult | None = None

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        clients = trainer.datamodule.client_ids[:2]  # type: ignore[attr-defined]
        self.found = LearningRateTrial(trainer, clients, 1, self.lines.append).run()


def fitted(*callbacks: pl.Callback) -> dict[str, Tensor]:
    pl.seed_everything(0, verbose=False)
    server = FederatedServer(FedAvg(), clients_per_round=2, local_steps=15, evaluate_every=0, figure=False)
    trainer = pl.Trainer(
        max_epochs=2,
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        callbacks=[server, *callbacks],
    )
    module = Warming()
    trainer.fit(module, datamodule=Synthetic(a=0, b=0, clients=4, batch_size=8))
    (optimizer,) = trainer.optimizers
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01)  # the warm-up went on
    return {**module.state_dict(), "logged": trainer.callback_metrics["train_loss"]}


def test_a_trial_leaves_nothing_behind() -> None:
    trying = Trying()
    tried, alone = fitted(trying), fitted()
    assert all(torch.equal(tried[name], alone[name]) for name in alone)
    found = trying.found
    assert found is not None
    assert [one.lr for one in found.tried][:2] == [0.01, 0.03]  # the rate at the end of the warm-up, not 0
    assert found.best.loss < found.start
    assert len({one.loss for one in found.tried}) == len(found.tried) == len(trying.lines)


def result(constant: float = math.nan, **losses: float) -> TrialResult:
    tried = [Tried(float(name[1:].replace("_", ".")), loss, 0.0) for name, loss in losses.items()]
    return TrialResult(2.0, constant, tried, 1, 5)


def test_the_lowest_loss_wins_and_the_smaller_of_two_alike() -> None:
    assert result(_0_01=1.0, _0_03=0.5, _0_1=math.inf).best.lr == 0.03
    assert result(_0_01=0.51, _0_03=0.5).best.lr == 0.01  # within 1 % of a fall of 1.5
    assert result(_0_01=0.52, _0_03=0.5).best.lr == 0.03


def test_a_plateau_is_no_result() -> None:
    assert result(_0_01=1.0).conclusive
    assert result(1.1, _0_01=1.0).conclusive
    assert not result(0.9, _0_01=1.0).conclusive  # class frequencies alone give 0.9
    assert not result(_0_01=2.0, _0_03=math.inf).conclusive
    assert result(_0_01=1.0).learns_at_own
    assert not result(_0_01=3.0, _0_003=1.0).learns_at_own


@pytest.mark.parametrize("lr", [1e-5, 0.0123, 0.1, 0.3, 0.9999, 1.0, 7.0])
def test_neighbours_are_a_factor_of_three_or_so_away(lr: float) -> None:
    below, above = neighbours(lr)
    assert 1.7 < above / lr < 6
    assert 1.7 < lr / below < 6
