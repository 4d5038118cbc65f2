"""What cannot be stacked is refused by name, or trained one by one; clients that fail are named."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from modules import quiet_trainer
from stacks import TOLERANCE, Smooth, data, fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.engines import ClientError


class NotAMean(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class LooksAtTheIndex(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if batch_idx % 2 else loss


class LooksAtTheTrainer(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.current_epoch)


class Draws(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * (1 + 0.1 * random.random()), batch[1]], batch_idx)


class Counts(Smooth):
    count = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


class Branches(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss.detach()) > 1 else 2 * loss


class AsksTheMetric(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("now", self.accuracy(self(batch[0]), batch[1]))
        return super().training_step(batch, batch_idx)


class SumsUp(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[1])), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Hooked(Smooth):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


REFUSED = {
    NotAMean: "not the mean over its samples",
    LooksAtTheIndex: "uses batch_idx",
    LooksAtTheTrainer: "looks at the trainer",
    Draws: "draws random numbers",
    Counts: "changes Counts.count",
    Branches: "does not work under torch.func",
    AsksTheMetric: "asks a metric for its value",
    SumsUp: "'samples'",
    Hooked: "overrides on_train_batch_end",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_stacked_is_refused_by_name_and_trained_one_by_one_by_default(
    kind: type[Smooth], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f'engine="vectorized" is impossible here: .*{REFUSED[kind]}'):
        fit("vectorized", FedADMM(), kind())
    server, _ = fit("auto", FedADMM(), kind())
    assert sum("Clients are trained one by one" in text and REFUSED[kind] in text for text in caplog.messages) == 1
    expected, _ = fit("sequential", FedADMM(), kind())
    assert torch.equal(server.federation.server.x_bar, expected.federation.server.x_bar)


@pytest.mark.parametrize(
    ("model", "reason"), [({"dropout": 0.3}, "torch.func"), ({"norm": True}, "torch.func|buffers")]
)
def test_layers_that_draw_or_remember_are_refused(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fit("vectorized", FedADMM(), Smooth(**model))


def test_hooks_optimisers_and_schedulers_that_need_single_steps_are_refused() -> None:
    class EveryStep(FederatedCallback):
        def on_client_step(self, *_: Any) -> None:
            pass

    with pytest.raises(ValueError, match="EveryStep has an on_client_step hook"):
        fit("vectorized", FedADMM(), Smooth(), trainer={"callbacks": [EveryStep()]})
    with pytest.raises(ValueError, match="scheduler steps with every batch"):
        fit("vectorized", FedADMM(), Smooth(scheduler="step"))

    class Factored(Smooth):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters())

    with pytest.raises(ValueError, match="Adafactor may mix the clients"):
        fit("vectorized", FedADMM(), Factored())


def test_auto_leaves_convolutions_and_large_models_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    class Convolves(Smooth):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3, padding=1).double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.conv(x.unsqueeze(1)).squeeze(1))

    fit("auto", FedADMM(), Convolves(), rounds=1)
    assert any("convolutions" in text for text in caplog.messages)
    found = fit("vectorized", FedADMM(), Convolves(), rounds=1)[0].federation.server.x_bar
    expected = fit("sequential", FedADMM(), Convolves(), rounds=1)[0].federation.server.x_bar
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_client_whose_data_are_bad_is_named() -> None:
    bad = data()
    x, y = bad.splits["train"]["c3"].tensors
    bad.splits["train"]["c3"] = TensorDataset(x, torch.full_like(y, 99))
    server = FederatedServer(FedADMM(), engine="vectorized", local_steps=3, evaluate_every=0)
    with pytest.raises(ClientError, match="round 0, client 'c3'"):
        quiet_trainer(server, 1).fit(Smooth(), datamodule=bad)


def test_a_client_that_diverges_is_named() -> None:
    bad = data()
    x, y = bad.splits["train"]["c3"].tensors
    bad.splits["train"]["c3"] = TensorDataset(x * float("inf"), y)
    server = FederatedServer(FedADMM(), engine="vectorized", local_steps=3, evaluate_every=0)
    with pytest.raises(ClientError, match="round 0, client 'c3'"):
        quiet_trainer(server, 1).fit(Smooth(), datamodule=bad)


@pytest.mark.parametrize(("name", "value"), [("engine", "fast"), ("compile", "yes"), ("compile", 1)])
def test_unknown_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FederatedServer\.{name} must be one of auto, .* got {value!r}"):
        FederatedServer(FedADMM(), **{name: value})
