"""Steps of large models in place, without their largest gradients, end where Lightning's own steps end."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.c_steps import needs_compiler
from helpers.marks import quick_first
from helpers.modules import classification, quiet_trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDualAvg, Scaffold
from lightning_fed.local.native import linear
from lightning_fed.local.steps.in_place import FusedStep

WIDTH = 520


class Listener(pl.Callback):
    """Has to be called, so that Lightning's own loop makes the steps."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


class Wide(pl.LightningModule):
    """Two large layers, one of them used twice, with a bias and without; dropout between them."""

    def __init__(self, bias: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first = nn.Linear(6, WIDTH)
            self.twice = nn.Linear(WIDTH, WIDTH, bias=bias)
            self.last = nn.Linear(WIDTH, 3)
        self.dropout = nn.Dropout(0.2)
        self.double()

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        return nn.functional.cross_entropy(self.last(torch.tanh(self.twice(hidden))), y)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(*batch)
        self.log("train_loss", loss, batch_size=len(batch[1]))
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.05)


class Once(Wide):
    """Every layer is used once."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = self.dropout(torch.tanh(self.twice(torch.tanh(self.first(x)))))
        return nn.functional.cross_entropy(self.last(hidden), y)


class OnceOverTime(Once):
    """Its layers see three-dimensional inputs."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        hidden = torch.tanh(self.twice(torch.tanh(self.first(x.unsqueeze(1)))))
        return nn.functional.cross_entropy(self.last(hidden).squeeze(1), y)


class OncePenalised(Once):
    """The weight has a gradient of its own too, which is that of the weight before the step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(*batch) + 1e-3 * self.twice.weight.square().sum()


class DifferentiatesFirst(Once):
    """Asks for a gradient inside the step, but does not step along it."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = self.loss(*batch)
        (slope,) = torch.autograd.grad(loss, self.first.weight, retain_graph=True)
        return loss * (1 + slope.norm().detach())


class Penalised(Wide):
    """The weight has a gradient of its own, beside what flows through the layer."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        return self.loss(*batch) + 1e-3 * self.twice.weight.square().sum()


class Differentiates(Wide):
    """Asks for a gradient inside the step, which factors cannot give."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        x = batch[0].clone().requires_grad_()
        loss = self.loss(x, batch[1])
        (slope,) = torch.autograd.grad(loss, x, create_graph=True)
        return loss + slope.square().sum()


class SometimesNone(Wide):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 1 else loss


def data() -> FederatedDataModule:
    plain = classification(3)
    for split in plain.splits.values():
        for cid, dataset in split.items():
            assert isinstance(dataset, TensorDataset)
            split[cid] = TensorDataset(dataset.tensors[0].double(), dataset.tensors[1])
    return plain


def fit(module: Wide, algorithm: Algorithm, *callbacks: pl.Callback) -> tuple[Tensor, pl.Trainer]:
    server = FederatedServer(algorithm, local_steps=4, seed=2, evaluate_every=0, engine="sequential")
    trainer = quiet_trainer(server, 2, callbacks=list(callbacks))
    trainer.fit(module, datamodule=data())
    assert server.federation is not None
    return server.federation.server.x_bar, trainer


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("algorithm", quick_first([FedADMM(eta=2.0), FedAvg(), Scaffold(2), FedDualAvg()]), ids=repr)
@pytest.mark.parametrize(
    ("kind", "options"),
    [
        (Wide, {}),
        (Wide, {"bias": False}),
        (Once, {}),
        (Once, {"bias": False}),
        (OnceOverTime, {}),
        (OncePenalised, {}),
        (DifferentiatesFirst, {}),
        (Penalised, {}),
        (Differentiates, {}),
        (SometimesNone, {}),
    ],
    ids=lambda value: getattr(value, "__name__", str(value)),
)
def test_fused_steps_give_the_numbers_of_lightnings_own(
    kind: type[Wide], options: dict[str, Any], algorithm: Algorithm
) -> None:
    expected, theirs = fit(kind(**options), algorithm, Listener())
    found, ours = fit(kind(**options), algorithm)
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)
    assert ours.callback_metrics.keys() == theirs.callback_metrics.keys()
    for name in ("train_loss",) if kind is Wide else ():
        assert float(ours.callback_metrics[name]) == pytest.approx(float(theirs.callback_metrics[name]), abs=1e-12)


def test_layers_are_as_they_were_after_a_fit() -> None:
    _, trainer = fit(Wide(), FedADMM())
    assert "forward" not in vars(trainer.lightning_module.twice)


@needs_compiler
@pytest.mark.parametrize("kind", [Once, OnceOverTime, DifferentiatesFirst, Wide, OncePenalised, Penalised])
def test_large_weights_move_once_in_each_step(kind: type[Wide], monkeypatch: pytest.MonkeyPatch) -> None:
    counted = []
    move = linear.move
    monkeypatch.setattr(linear, "move", lambda *args: counted.append(args) or move(*args))
    fit(kind(), FedADMM())
    assert len(counted) == 24  # rounds x clients x steps


def test_without_a_compiler_torchs_own_operators_give_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    expected, _ = fit(Once(), FedADMM(eta=2.0))
    monkeypatch.setattr(linear, "defect", lambda: "for the sake of it")
    found, _ = fit(Once(), FedADMM(eta=2.0))
    assert torch.allclose(found, expected, rtol=0, atol=1e-12)


def test_other_optimisers_and_clipping_keep_their_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: Any) -> Any:
        raise AssertionError("fused")

    monkeypatch.setattr(FusedStep, "__call__", never)

    class Momentum(Wide):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.05, momentum=0.9)

    fit(Momentum(), FedADMM())
    server = FederatedServer(FedADMM(), local_steps=2, evaluate_every=0)
    quiet_trainer(server, 1, gradient_clip_val=0.1).fit(Wide(), datamodule=data())
