"""Coarse ratios to a hand-written loop, in CPU time, so that a busy machine does not decide."""

import importlib.util
import time
from pathlib import Path

import pytest
import pytorch_lightning as pl
import torch
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.models import MLP, FemnistCNN

HAND_WRITTEN = Path(__file__).parents[2] / "benchmarks" / "contestants" / "loop.py"


@pytest.fixture(scope="module")
def loop():
    spec = importlib.util.spec_from_file_location("hand_written_loop", HAND_WRITTEN)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Clock(pl.Callback):
    """CPU seconds of every round."""

    def __init__(self):
        self.seconds = []

    def on_train_epoch_start(self, *_):
        self.began = time.process_time()

    def on_train_epoch_end(self, *_):
        self.seconds.append(time.process_time() - self.began)


def federation(shape, classes, clients):
    draws = torch.Generator().manual_seed(0)
    return [
        (torch.rand(60, *shape, generator=draws), torch.randint(classes, (60,), generator=draws))
        for _ in range(clients)
    ]


def ours(module, data, rounds, cohort, steps, **options):
    """CPU seconds of the quickest round after the first."""
    server = FederatedServer(
        FedADMM(), clients_per_round=cohort, local_steps=steps, evaluate_every=0, figure=False, **options
    )
    clock = Clock()
    trainer = pl.Trainer(
        max_epochs=rounds + 1,
        callbacks=[server, clock],
        accelerator="cpu",
        logger=False,
        enable_checkpointing=False,
        enable_model_summary=False,
        enable_progress_bar=False,
        limit_val_batches=0,
    )
    datasets = {i: TensorDataset(*samples) for i, samples in enumerate(data)}
    trainer.fit(module, datamodule=FederatedDataModule(datasets, batch_size=2))
    return min(clock.seconds[1:])


def by_hand(loop, module, data, rounds, cohort, steps):
    """The same of the loop."""
    federation = loop.Loop(module, data, cohort, steps, batch=2)
    federation.play()
    seconds = []
    for _ in range(rounds):
        began = time.process_time()
        federation.play()
        seconds.append(time.process_time() - began)
    return min(seconds)


def test_small_models_train_three_times_as_fast_as_by_hand(loop):
    data, work = federation((60,), 10, clients=20), {"rounds": 4, "cohort": 10, "steps": 200}
    theirs = by_hand(loop, MLP(log_train=False), data, **work)
    assert theirs > 3 * ours(MLP(log_train=False), data, **work, compile=False)


def test_large_models_train_faster_than_by_hand(loop):
    data, work = federation((1, 28, 28), 62, clients=2), {"rounds": 3, "cohort": 1, "steps": 100}
    theirs = by_hand(loop, FemnistCNN(log_train=False), data, **work)
    assert theirs > 1.2 * ours(FemnistCNN(log_train=False), data, **work, engine="sequential")
