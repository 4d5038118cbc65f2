"""Unusual modules, data and callbacks: every engine gives the numbers and logs of one client after another."""

from __future__ import annotations

import types
from typing import Any

import pytest
import torch
from helpers.odd_modules import KeepsAWindow, Odd, ReadsAMetric, assert_same, data, fit
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAUROC

from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import FederatedCallback


class WeightsClasses(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y, weight=x.new_tensor([1.0, 2.0, 5.0]))


class SumsLosses(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y, reduction="sum")


class LogsARoot(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("root", loss.sqrt())


class LogsACount(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("count", float(len(y)))


class WeighsBatchesEqually(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("train_loss", loss, batch_size=1)


class NamesTheBatch(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log(f"loss_{batch_idx}", loss)


class MetersBatches(Odd):
    def build(self) -> None:
        self.meter = SumMetric()

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.meter.update(loss.reshape(1))
        self.log("meter", self.meter)


class KeepsScores(Odd):
    def build(self) -> None:
        self.area = MulticlassAUROC(3)

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.area.update(self(x).detach(), y)
        self.log("area", self.area, on_step=False, on_epoch=True)


class ClampsGradients(Odd):
    def configure_optimizers(self) -> Any:
        self.net[0].weight.register_hook(lambda gradient: gradient.clamp(-0.01, 0.01))
        return super().configure_optimizers()


class ClampsWeights(Odd):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.clamp())
        return optimizer

    @torch.no_grad()
    def clamp(self) -> None:
        for p in self.parameters():
            p.clamp_(-0.2, 0.2)


class DecaysAnIdleHead(Odd):
    def build(self) -> None:
        self.head = nn.Linear(3, 3)

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.1)


def one_label_first() -> FederatedDataModule:
    """The first two clients have one sample, and so one label."""
    odd = data()
    for cid in ("c0", "c1"):
        x, y = odd.splits["train"][cid].tensors
        odd.splits["train"][cid] = TensorDataset(x[:1], y[:1] * 0 + int(cid[1]))
    return odd


STACKED = (WeightsClasses, SumsLosses, LogsARoot, LogsACount, WeighsBatchesEqually, MetersBatches, KeepsScores)


@pytest.mark.parametrize("options", [{}, {"local_steps": None, "local_epochs": 2}], ids=["steps", "epochs"])
@pytest.mark.parametrize("kind", STACKED, ids=lambda kind: kind.__name__)
def test_losses_and_logs_of_any_kind_are_stacked_right(kind: type[Odd], options: dict[str, Any]) -> None:
    for own in (data, one_label_first):
        expected = fit(kind, data=own(), algorithm=FedAvg(), **options)
        assert_same(expected, fit(kind, data=own(), algorithm=FedAvg(), engine="vectorized", **options))


REFUSED = {
    NamesTheBatch: "uses batch_idx",
    ReadsAMetric: "asks a metric for its value",
    ClampsGradients: r"hook listens to net\.0\.weight",
    ClampsWeights: "hook listens to the optimiser",
    DecaysAnIdleHead: r"head\.weight has no gradient",
    KeepsAWindow: r"changes KeepsAWindow\.window",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_stack_would_get_wrong_is_refused(kind: type[Odd]) -> None:
    with pytest.raises(ValueError, match=REFUSED[kind]):
        fit(kind, engine="vectorized", algorithm=FedAvg())


class Settings(Odd):
    """Reads a factor from where ``place`` says; callbacks change it there."""

    place = ""

    def build(self) -> None:
        self.hparams.factor = self._factor = 1.0
        self.config, self.nested = types.SimpleNamespace(factor=1.0), {"of": [{"factor": 1.0}]}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        known = {"hparams": self.hparams, "config": vars(self.config), "nested": self.nested["of"][0]}
        known |= {"private": {"factor": self._factor}}
        return super().loss(x, y) * known[self.place]["factor"]


class Changes(FederatedCallback):
    def on_round_start(self, trainer: Any, module: Any, round: int, cohort: Any) -> None:
        place, factor = module.place, 1.0 + round
        if place == "private":
            module._factor = factor
        else:
            homes = {"hparams": module.hparams, "config": vars(module.config), "nested": module.nested["of"][0]}
            homes[place]["factor"] = factor


@pytest.mark.parametrize("place", ["hparams", "config", "nested", "private"])
def test_settings_that_change_between_rounds_are_seen_wherever_they_are(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "place", place)
    assert_same(fit(Settings, Changes()), fit(Settings, Changes(), engine="vectorized"))


def test_a_trainer_that_begins_to_accumulate_ends_stacking() -> None:
    expected = fit(Odd, GradientAccumulationScheduler({0: 1, 1: 2}))
    with pytest.warns(UserWarning, match="gradients are accumulated"):
        assert_same(expected, fit(Odd, GradientAccumulationScheduler({0: 1, 1: 2}), engine="vectorized"))


class Pools(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.mean(1), y)


def test_clients_with_samples_of_different_shapes_form_stacks_of_their_own() -> None:
    def series() -> FederatedDataModule:
        odd = data()
        odd.splits.pop("test")
        for i, (cid, dataset) in enumerate(odd.splits["train"].items()):
            x, y = dataset.tensors
            odd.splits["train"][cid] = TensorDataset(torch.stack([x] * (5 if i < 3 else 2), 1).cumsum(1), y)
        return odd

    expected = fit(Pools, data=series())
    assert_same(expected, fit(Pools, data=series(), engine="vectorized"))
