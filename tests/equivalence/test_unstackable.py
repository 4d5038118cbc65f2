"""What cannot be stacked leaves no trace and is told of; clients that fail are named.

The modules that are refused, with the reasons, are in helpers/engines/refused.py.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.modules import quiet_trainer
from helpers.stacks import TOLERANCE, Smooth, data, fit
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.engines import ClientError


def test_a_module_that_declares_nothing_is_trained_one_by_one_and_told_once(caplog: pytest.LogCaptureFixture) -> None:
    server, _ = fit("auto", FedADMM(), Smooth())
    told = [text for text in caplog.messages if "Clients are trained one by one" in text]
    assert len(told) == 1
    assert "Smooth does not declare that it can be stacked" in told[0]
    assert "stackable = True" in told[0]
    expected, _ = fit("sequential", FedADMM(), Smooth())
    assert torch.equal(server.federation.server.x_bar, expected.federation.server.x_bar)


def test_a_module_that_declares_it_is_stacked(caplog: pytest.LogCaptureFixture) -> None:
    class Declared(Smooth):
        stackable = True

    fit("auto", FedADMM(), Declared())
    assert any("Clients are trained side by side" in text for text in caplog.messages)


class Remembers(Smooth):
    """Keeps what it sees in a helper that no copy of the module's parts shows."""

    class Bank:
        def __init__(self) -> None:
            self.seen: list[Tensor] = []

    def __init__(self) -> None:
        super().__init__()
        self.bank = self.Bank()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.bank.seen.append(batch[0].mean())
        return super().training_step(batch, batch_idx)


class Nests(Smooth):
    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, list[Any]] = {"losses": [[], []]}

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.kept["losses"][0].append(loss.detach())
        return loss * (1 + len(self.kept["losses"][0]) / 10)


class ListsMetrics(Smooth):
    def __init__(self) -> None:
        super().__init__()
        self.metrics = [MeanMetric()]

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.metrics[0].update(batch[0].mean())
        return super().training_step(batch, batch_idx)


@pytest.mark.parametrize("kind", [Remembers, Nests, ListsMetrics])
def test_the_trial_leaves_no_trace(kind: type[Smooth]) -> None:
    """A module that is refused trains as if it had not been tried."""
    declared: Any = type(kind.__name__, (kind,), {"stackable": True})
    with pytest.raises(ValueError, match=r"it changes \w+\.(bank|kept)|it turns a tensor into a number"):
        fit("vectorized", FedADMM(), kind())
    found, _ = fit("auto", FedADMM(), declared())
    expected, _ = fit("sequential", FedADMM(), declared())
    assert torch.equal(found.federation.server.x_bar, expected.federation.server.x_bar)


def test_a_module_that_cannot_be_copied_is_trained_one_by_one() -> None:
    class Uncopied(Smooth):
        stackable = True

        def __deepcopy__(self, memo: Any) -> Any:
            raise RuntimeError("only one of me")

    with pytest.raises(ValueError, match="Uncopied cannot be copied: only one of me"):
        fit("vectorized", FedADMM(), Uncopied())
    fit("auto", FedADMM(), Uncopied())


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
        stackable = True

        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3, padding=1).double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.conv(x.unsqueeze(1)).squeeze(1))

    fit("auto", FedADMM(), Convolves(), rounds=1)
    assert any("convolutions" in text for text in caplog.messages)


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


class IdleOnShortBatches(Smooth):
    """Its head has a gradient on full batches only, which the first batch of a client does not show."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(3, 3).double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        scores = self(batch[0])
        scores = self.head(scores) if len(batch[1]) == 4 else scores
        return nn.functional.cross_entropy(scores, batch[1])

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=0.05, weight_decay=0.5)


def test_a_parameter_without_a_gradient_is_noticed_for_every_shape_of_a_batch() -> None:
    options = {"local_steps": None, "local_epochs": 2}
    torch.manual_seed(0)
    expected, _ = fit("sequential", FedAvg(), IdleOnShortBatches(), **options)
    torch.manual_seed(0)
    with pytest.warns(UserWarning, match=r"head\.weight has no gradient, but the optimiser might move it"):
        found, _ = fit("vectorized", FedAvg(), IdleOnShortBatches(), **options)
    assert torch.allclose(found.federation.server.x_bar, expected.federation.server.x_bar, rtol=0, atol=TOLERANCE)
