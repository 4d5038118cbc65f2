"""Unusual modules, data and callbacks: every engine gives the numbers and logs of one client after another."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
import types
from collections import deque
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric, SumMetric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed._compat import SIGTERMException
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg
from lightning_fed.callbacks import FederatedCallback

WORLD = types.SimpleNamespace(factor=1.0)


class Odd(Net):
    """In float64; subclasses say what is odd about them."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.build()
        self.double()

    def build(self) -> None:
        pass

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.note(loss.detach(), *batch, batch_idx)
        return loss

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("train_loss", loss)


def data(clients: int = 4, **kwargs: Any) -> FederatedDataModule:
    plain = classification(clients, **kwargs)
    for split in plain.splits.values():
        for cid, dataset in split.items():
            assert isinstance(dataset, TensorDataset)
            split[cid] = TensorDataset(dataset.tensors[0].double(), dataset.tensors[1])
    return plain


def fit(kind: Any, *callbacks: pl.Callback, **kwargs: Any) -> tuple[Tensor, dict[str, float]]:
    WORLD.factor = 1.0
    options = {"local_steps": 3, "seed": 3, "evaluate_every": 0, "figure": False, "engine": "sequential"}
    algorithm: Algorithm = kwargs.pop("algorithm", FedADMM(eta=0.5))
    trainer_options, own_data = kwargs.pop("trainer", {}), kwargs.pop("data", None) or data()
    server = FederatedServer(algorithm, **{**options, **kwargs})
    trainer = quiet_trainer(server, 2, callbacks=list(callbacks), **trainer_options)
    trainer.fit(kind(), datamodule=own_data)
    assert server.federation is not None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "federated/seconds"}
    return server.federation.server.x_bar, logged


def assert_same(expected: tuple[Tensor, dict[str, float]], found: tuple[Tensor, dict[str, float]]) -> None:
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-10)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


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


class ReadsAMetric(Odd):
    def build(self) -> None:
        self.mean = MeanMetric()

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.mean.update(loss)
        self.log("mean", self.mean.compute())


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


class KeepsAWindow(Odd):
    def build(self) -> None:
        self.window = deque([1.0], maxlen=2)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.window.append(self.window[-1] + 0.1)
        return super().loss(x, y) * self.window[0]


def one_label_first() -> FederatedDataModule:
    """The first two clients have one sample, and so one label."""
    odd = data()
    for cid in ("c0", "c1"):
        x, y = odd.splits["train"][cid].tensors
        odd.splits["train"][cid] = TensorDataset(x[:1], y[:1] * 0 + int(cid[1]))
    return odd


REFUSED = {
    WeightsClasses: "not the mean over its samples",
    SumsLosses: "not the mean over its samples",
    LogsARoot: "'root' is not the mean",
    LogsACount: "'count' is not the mean",
    WeighsBatchesEqually: "'train_loss' is not the mean",
    NamesTheBatch: "uses batch_idx",
    MetersBatches: "SumMetric is not updated sample by sample",
    KeepsScores: "MulticlassAUROC keeps what it is given",
    ReadsAMetric: "asks a metric for its value",
    ClampsGradients: r"hook listens to net\.0\.weight",
    ClampsWeights: "hook listens to the optimiser",
    DecaysAnIdleHead: r"head\.weight has no gradient",
    KeepsAWindow: r"changes KeepsAWindow\.window",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_a_stack_would_get_wrong_is_refused(kind: type[Odd]) -> None:
    own = one_label_first() if kind in (WeightsClasses, SumsLosses) else None
    with pytest.raises(ValueError, match=REFUSED[kind]):
        fit(kind, engine="vectorized", data=own, algorithm=FedAvg())


class Settings(Odd):
    """Reads a factor from where ``place`` says; callbacks change it there."""

    place = ""

    def build(self) -> None:
        self.hparams.factor = self._factor = 1.0
        self.config, self.nested = types.SimpleNamespace(factor=1.0), {"of": [{"factor": 1.0}]}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        known = {"hparams": self.hparams, "config": vars(self.config), "nested": self.nested["of"][0]}
        known |= {"private": {"factor": self._factor}, "world": vars(WORLD)}
        return super().loss(x, y) * known[self.place]["factor"]


class Changes(FederatedCallback):
    def on_round_start(self, trainer: Any, module: Any, round: int, cohort: Any) -> None:
        place, factor = module.place, 1.0 + round
        if place == "private":
            module._factor = factor
        else:
            homes = {"hparams": module.hparams, "config": vars(module.config), "nested": module.nested["of"][0]}
            {**homes, "world": vars(WORLD)}[place]["factor"] = factor


@pytest.mark.parametrize("place", ["hparams", "config", "nested", "private"])
def test_settings_that_change_between_rounds_are_seen_wherever_they_are(
    place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Settings, "place", place)
    assert_same(fit(Settings, Changes()), fit(Settings, Changes(), engine="vectorized"))


def test_a_changed_world_ends_stacking(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Settings, "place", "world")
    expected = fit(Settings, Changes())
    with pytest.warns(UserWarning, match="another loss than when it was recorded"):
        assert_same(expected, fit(Settings, Changes(), engine="vectorized"))


def test_a_trainer_that_begins_to_accumulate_ends_stacking() -> None:
    expected = fit(Odd, GradientAccumulationScheduler({0: 1, 1: 2}))
    with pytest.warns(UserWarning, match="gradients are accumulated"):
        assert_same(expected, fit(Odd, GradientAccumulationScheduler({0: 1, 1: 2}), engine="vectorized"))


class Pools(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.mean(1), y)


def test_clients_with_samples_of_different_shapes_are_not_stacked() -> None:
    def series() -> FederatedDataModule:
        odd = data()
        odd.splits.pop("test")
        for i, (cid, dataset) in enumerate(odd.splits["train"].items()):
            x, y = dataset.tensors
            odd.splits["train"][cid] = TensorDataset(torch.stack([x] * (5 if i < 3 else 2), 1).cumsum(1), y)
        return odd

    expected = fit(Pools, data=series())
    with pytest.warns(UserWarning, match="different shapes"):
        assert_same(expected, fit(Pools, data=series(), engine="vectorized"))


class Wide(Odd):
    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.wide, self.last = nn.Linear(6, 520), nn.Linear(520, 520), nn.Linear(520, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.wide(torch.tanh(self.first(x)))))


class Pruned(Wide):
    def build(self) -> None:
        super().build()
        prune.l1_unstructured(self.wide, "weight", 0.3)


class Replaced(Wide):
    def build(self) -> None:
        super().build()
        self.wide.forward = lambda x: 2 * nn.functional.linear(x, self.wide.weight, self.wide.bias)


class Halves(Wide):
    def configure_optimizers(self) -> Any:
        self.wide.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 2))
        return super().configure_optimizers()


class LaterAdversarial(Wide):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.current_epoch:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(super().loss(x, y), x)
            x = (x + 0.1 * slope.sign()).detach()
        return super().loss(x, y)


class LaterPenalised(Wide):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().loss(x, y)
        if self.current_epoch:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        return loss


class Listener(pl.Callback):
    """Has to be called, so that Lightning's own loop makes the steps."""

    def on_after_backward(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("kind", [Pruned, Replaced, Halves, LaterAdversarial, LaterPenalised])
def test_large_layers_with_habits_of_their_own_give_the_same_numbers(kind: type[Wide]) -> None:
    assert_same(fit(kind, Listener()), fit(kind))


class CannotBePickled(Odd):
    def build(self) -> None:
        parametrizations.weight_norm(self.net[0])
        self.after = lambda loss: 2 * loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after(super().loss(x, y))


class AsksForBatches(Odd):
    def build(self) -> None:
        self.accuracy = MulticlassAccuracy(3)

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("batch", self.accuracy(self(x), y))


def test_workers_need_nothing_pickled_but_answers() -> None:
    assert_same(fit(CannotBePickled), fit(CannotBePickled, workers=2))
    assert_same(fit(AsksForBatches), fit(AsksForBatches, workers=2))


@pytest.mark.parametrize(("kind", "what"), [(KeepsAWindow, "window"), (ReadsAMetric, "reads the value of mean")])
def test_workers_notice_what_passes_from_client_to_client(kind: type[Odd], what: str) -> None:
    expected = fit(kind)
    with pytest.warns(UserWarning, match=what):
        assert_same(expected, fit(kind, workers=2))


class WritesToTheLogger(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        assert self.logger is not None
        self.logger.log_metrics({"direct": float(loss)})


def test_workers_lose_nothing_that_is_written_to_a_logger(tmp_path: Path) -> None:
    def rows(name: str, **kwargs: Any) -> int:
        fit(WritesToTheLogger, trainer={"logger": CSVLogger(tmp_path, name)}, **kwargs)
        return len((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines())

    expected = rows("alone")
    with pytest.warns(UserWarning, match="the logger"):
        assert rows("workers", workers=2) == expected


class Prints(Odd):
    def note(self, *_: Any) -> None:
        print("stepped")


def test_what_workers_print_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    fit(Prints, workers=2)
    assert capfd.readouterr().out.count("stepped") == 4 * 3 * 2


def test_workers_hold_few_files_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 300, before[1]))
    try:
        fit(Odd, workers=2, data=data(310), local_steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Slow(Odd):
    def note(self, *_: Any) -> None:
        time.sleep(0.3)


def test_a_signal_ends_a_round_of_workers_and_leaves_no_process(forked: list[int]) -> None:
    server = FederatedServer(FedADMM(), workers=2, engine="sequential", local_steps=5, evaluate_every=0)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SIGTERMException):
        quiet_trainer(server, 1).fit(Slow(), datamodule=data())
    assert server.rounds_done == 0
    assert forked
    for pid in forked:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
