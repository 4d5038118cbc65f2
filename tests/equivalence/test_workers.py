"""Clients trained in other processes give the bits of clients trained in this one."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.marks import quick_first
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torchmetrics import MeanMetric
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedAvg, FedLin, Scaffold
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.engines import ClientError, DivergenceError
from lightning_fed.transforms import TopK


class Talkative(Net):
    """Dropout, BatchNorm, momentum; logs numbers, a largest one, and metrics that keep sums and lists."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**{"dropout": 0.3, "norm": True, "optimizer": "momentum", **kwargs})
        self.accuracy, self.mean = MulticlassAccuracy(3, average="micro"), MeanMetric()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.mean.update(loss.detach())
        self.log("train_loss", loss, batch_size=len(y))
        self.log("largest", loss.detach(), reduce_fx="max", batch_size=len(y))
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        self.log("mean", self.mean, on_step=False, on_epoch=True, batch_size=len(y))
        return loss


def fit(
    workers: int, algorithm: Algorithm, module: pl.LightningModule, *callbacks: pl.Callback, **kwargs: Any
) -> tuple[FederatedServer, pl.Trainer]:
    options = {"local_steps": 4, "seed": 5, "evaluate_every": 1, **kwargs}
    server = FederatedServer(algorithm, workers=workers, engine="sequential", **options)
    trainer = quiet_trainer(server, 3, callbacks=list(callbacks))
    trainer.fit(module, datamodule=classification(5, batch_size=5, drop_last=True))
    return server, trainer


def test_a_model_that_is_part_of_the_state_is_sent_once() -> None:
    seen: list[Any] = []

    class Keep(FederatedCallback):
        def on_client_end(self, trainer: Any, module: Any, visit: Any, reply: Any) -> None:
            seen.append(reply)

    fit(2, FedADMM(), Talkative(), Keep())
    assert len(seen) == 3 * 5
    assert all(reply.x_i.data_ptr() == reply.state.x_i.data_ptr() for reply in seen)


def everything(server: FederatedServer, trainer: pl.Trainer) -> dict[str, Any]:
    federation = server.federation
    assert federation is not None
    states = {"server": federation.server, **{cid: federation.store[cid].state for cid in federation.store}}
    found = {f"{who}.{i}": leaf for who, s in states.items() for i, leaf in enumerate(pytree.tree_leaves(s))}
    found |= {f"{cid}.{name}": b for cid in federation.store for name, b in federation.store[cid].buffers.items()}
    found |= {f"module.{name}": t for name, t in trainer.lightning_module.state_dict().items()}
    return {**found, "cost": vars(federation.cost)}


@pytest.mark.parametrize(
    "algorithm",
    [
        FedLin(),
        *quick_first([Compressed(FedADMM(eta=1.0), TopK(9)), FedADMM(eta=1.0), FedAvg(stragglers=0.4), Scaffold(1)]),
    ],
    ids=lambda algorithm: type(algorithm).__name__,
)
@pytest.mark.parametrize("buffers", quick_first(["average", "local"]))
def test_workers_give_the_same_bits(algorithm: Algorithm, buffers: Any) -> None:
    model = {"optimizer": "sgd"} if isinstance(algorithm, FedLin) else {}
    one, first = fit(1, algorithm, Talkative(**model), buffers=buffers)
    two, second = fit(2, algorithm, Talkative(**model), buffers=buffers)
    expected, found = everything(one, first), everything(two, second)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value) if isinstance(value, Tensor) else found[name] == value, name
    timeless = {k: float(v) for k, v in first.callback_metrics.items() if k != "federated/seconds"}
    assert {"train_loss", "largest", "train_acc", "mean"} <= timeless.keys()
    logged = {k: float(v) for k, v in second.callback_metrics.items() if k != "federated/seconds"}
    assert logged == pytest.approx(timeless, rel=1e-6)


class Ends(FederatedCallback):
    """Who ended, in which process, and with which model in the module."""

    def __init__(self) -> None:
        self.ends: list[tuple[Any, int, bool, int]] = []

    def on_client_end(self, trainer: Any, module: Any, visit: Any, reply: Any) -> None:
        x = torch.nn.utils.parameters_to_vector(module.parameters()).detach()
        self.ends.append((visit.client, os.getpid(), bool(torch.equal(x, reply.x_i)), visit.step))


def test_callbacks_are_told_here_and_in_order() -> None:
    ends = Ends()
    fit(3, FedADMM(), Net(), ends)
    assert ends.ends == [(f"c{i}", os.getpid(), True, 4) for i in range(5)] * 3


class Fails(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        if self.current_epoch == 1 and float(batch[0].sum()) < 2:
            raise ZeroDivisionError("no luck")
        return super().training_step(batch, batch_idx)


def test_an_error_names_round_and_client_and_nothing_is_left_behind(forked: list[int]) -> None:
    with pytest.raises(ClientError) as alone:
        fit(1, FedADMM(), Fails())
    with pytest.raises(ClientError) as shared:
        fit(2, FedADMM(), Fails())
    assert str(shared.value) == str(alone.value)
    assert "round 1, client" in str(shared.value)
    assert forked
    for pid in forked:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def test_divergence_is_told_apart() -> None:
    with pytest.raises(DivergenceError, match=r"round 0, client 'c\d'"):
        fit(2, FedAvg(), Net(lr=1e38))


class Dies(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        os._exit(9)


def test_a_process_that_dies_is_noticed() -> None:
    began = time.monotonic()
    with pytest.raises(ClientError, match="round 0, client 'c0': its process died"):
        fit(2, FedADMM(), Dies())
    assert time.monotonic() - began < 60


class Counts(Net):
    count = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        self.count += 1
        return super().training_step(batch, batch_idx) / self.count


def test_what_a_client_changes_in_the_module_reaches_no_other_client_in_any_process() -> None:
    dropped = r"Training changes the attribute count of Counts.* register a buffer"
    with pytest.warns(UserWarning, match=dropped):
        expected, _ = fit(1, FedADMM(), Counts())
    with pytest.warns(UserWarning, match=dropped) as caught:
        found, _ = fit(2, FedADMM(), Counts())
    assert torch.equal(found.federation.server.x_bar, expected.federation.server.x_bar)
    assert not any("in this process" in str(warning.message) for warning in caught)


class EveryStep(FederatedCallback):
    def on_client_step(self, *_: Any) -> None:
        pass


class Gradients(pl.Callback):
    def on_after_backward(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("callback", [EveryStep(), Gradients()], ids=lambda callback: type(callback).__name__)
def test_callbacks_that_must_see_every_step_refuse_workers(callback: pl.Callback) -> None:
    with pytest.raises(ValueError, match=f"workers=2 is impossible here: {type(callback).__name__}"):
        fit(2, FedADMM(), Net(), callback)


@pytest.mark.parametrize("workers", [0, -1, 1.5, True])
def test_a_number_of_workers_that_means_nothing_is_refused(workers: Any) -> None:
    with pytest.raises(ValueError, match=r"FederatedServer\.workers must be a whole number >= 1"):
        FederatedServer(FedADMM(), workers=workers)
