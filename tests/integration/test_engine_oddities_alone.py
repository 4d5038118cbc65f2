"""Unusual modules: fused steps and workers give the numbers and logs of one client after another."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modules import quiet_trainer
from helpers.odd_modules import KeepsAWindow, Listener, Odd, ReadsAMetric, Wide, assert_same, data, fit
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.nn.utils import parametrizations, prune
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.lightning import SIGTERMException


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


def test_workers_notice_what_passes_from_client_to_client() -> None:
    expected = fit(ReadsAMetric)
    with pytest.warns(UserWarning, match="reads the value of mean"):
        assert_same(expected, fit(ReadsAMetric, workers=2))


def test_a_window_over_batches_ends_with_the_visit() -> None:
    with pytest.warns(UserWarning, match="Training changes the attribute window"):
        expected = fit(KeepsAWindow)
    with pytest.warns(UserWarning, match="Training changes the attribute window"):
        assert_same(expected, fit(KeepsAWindow, workers=2))


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
