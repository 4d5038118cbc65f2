"""Federations that several processes run, started as scripts: ``python ranks.py FOLDER CASE ...``.

Each case is run by the processes that Lightning, or torchrun, starts; the first writes what it ended with.
"""

from __future__ import annotations

import gc
import json
import os
import random
import signal
import sys
import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanMetric

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedDyn, FedLin, Scaffold
from lightning_fed.callbacks import TheoryMeter
from lightning_fed.core.memory import tensors_of
from lightning_fed.engines import vectorized
from lightning_fed.engines.ranks import RanksEngine
from lightning_fed.trainer.strategy import FederatedStrategy

ROUNDS = 4


class Net(pl.LightningModule):
    """A small classifier with BatchNorm, a metric and a scheduler by step; ``noise`` is drawn in evaluation too."""

    def __init__(self, norm: bool = True, width: int = 6, noise: bool = False) -> None:
        super().__init__()
        self.net = nn.Sequential(nn.Linear(4, width), nn.BatchNorm1d(width) if norm else nn.Tanh(), nn.Linear(width, 3))
        self.seen = MeanMetric()
        self.stackable, self.noise = not norm, noise

    def training_step(self, batch: Any) -> Tensor:
        x, y = batch
        if not self.stackable and x.max() > 50:
            raise ValueError("a broken sensor")
        if self.noise:
            x = x * torch.rand(()) + random.random() + np.random.rand()
        loss = nn.functional.cross_entropy(self.net(x), y)
        self.log("train_loss", loss)
        return loss

    def validation_step(self, batch: Any) -> None:
        x, y = batch
        self.seen(nn.functional.cross_entropy(self.net(x), y))
        self.log("val_loss", self.seen)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        if self.stackable:
            return optimizer
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, 3, gamma=0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Fault(pl.Callback):
    """Sends a signal to this process in the middle of a round, once: a file remembers that it was done."""

    def __init__(self, rank: int, round: int, number: int, note: Path) -> None:
        self.rank, self.round, self.number, self.note = rank, round, number, note

    def on_train_batch_start(self, trainer: pl.Trainer, *_: Any) -> None:
        if trainer.global_rank == self.rank and trainer.current_epoch == self.round and not self.note.exists():
            self.note.touch()
            os.kill(os.getpid(), self.number)


class Held(pl.Callback):
    """How many tensors the engines of rounds that are over hold."""

    most = 0

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        engines = [each for each in gc.get_objects() if type(each) is RanksEngine]  # isinstance would ask dead proxies
        self.most = max([self.most, *(len(engine._own) + len(engine._sums) for engine in engines)])


def data(broken: bool = False, clients: int = 9) -> FederatedDataModule:
    rng = torch.Generator().manual_seed(5)
    sizes = [6 + 4 * (i % 3) for i in range(clients)]
    sets = [TensorDataset(torch.randn(n, 4, generator=rng), torch.randint(3, (n,), generator=rng)) for n in sizes]
    if broken:
        sets[4].tensors[0][0] = 99.0
    return FederatedDataModule(sets, batch_size=4, test=sets[:3], val=sets[:2])


#: Arguments of the server, of the module, and further callbacks by case.
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "fedadmm, batchnorm": ({"algorithm": FedADMM(eta=1.0), "clients_per_round": 5}, {}),
    "scaffold": ({"algorithm": Scaffold(), "clients_per_round": 7}, {}),
    "feddyn, stacked": ({"algorithm": FedDyn(alpha=0.1), "engine": "vectorized", "compile": False}, {"norm": False}),
    "fedlin": ({"algorithm": FedLin(), "buffers": "server"}, {}),
    "disk, large": ({"algorithm": FedADMM(), "clients_per_round": 4, "store": "disk"}, {"width": 2**15}),
    "disk, small": ({"algorithm": FedADMM(), "clients_per_round": 4, "store": "disk", "buffers": "local"}, {}),
    "personal": ({"algorithm": FedADMM(), "clients_per_round": 5, "personal": "net.2.*"}, {}),
    "skip": ({"algorithm": FedADMM(), "on_client_error": "skip"}, {}),
    "noise": ({"algorithm": FedADMM(), "clients_per_round": 5}, {"noise": True}),
}


def fit(name: str, folder: Path, ckpt_path: Any = None, rounds: int = ROUNDS, **options: Any) -> dict[str, Any]:
    """Run a case; everything that the federation ended with, as plain tensors."""
    settings, model = CASES[name]
    torch.manual_seed(3)
    module = Net(**model)
    server = FederatedServer(**{"local_epochs": 1, "seed": 1, "figure": False, **settings})
    callbacks = [
        server,
        kept := Held(),
        *options.pop("callbacks", ()),
        *([TheoryMeter(every=2)] if name == "scaffold" else ()),
    ]
    if options.pop("saves", True):
        callbacks.append(ModelCheckpoint(folder / name, save_last=True))
    quiet = {"enable_progress_bar": False, "enable_model_summary": False, "logger": False}
    trainer = pl.Trainer(max_epochs=rounds, callbacks=callbacks, accelerator="cpu", **{**quiet, **options})
    with patch.object(vectorized, "STACK", 2):  # several stacks in a small cohort
        trainer.fit(module, datamodule=data(name == "skip"), ckpt_path=ckpt_path)
    federation = server.federation
    assert federation is not None
    memories = {cid: federation.store[cid] for cid in federation.store}
    parts = {cid: {**tensors_of(memory.state), **memory.buffers} for cid, memory in memories.items()}
    clients = {f"{cid}.{name}": value for cid, part in parts.items() for name, value in part.items()}
    clients |= {f"{cid}.visits": torch.tensor(m.visits) for cid, m in memories.items()}
    metrics = {k: float(v) for k, v in trainer.callback_metrics.items() if k != "federated/seconds"}
    found = {"model": module.state_dict(), "clients": clients, "metrics": metrics, "rank": trainer.global_rank}
    return {**found, "held": kept.most}


def _forked(name: str, strategy: str, devices: int) -> dict[str, Any]:
    settings, model = CASES[name]
    torch.manual_seed(3)
    module, server = Net(**model), FederatedServer(**settings, local_epochs=1, seed=1, figure=False)
    quiet = dict.fromkeys(("enable_progress_bar", "enable_model_summary", "logger", "enable_checkpointing"), False)
    options = {"accelerator": "cpu", "devices": devices, "strategy": strategy, **quiet}
    pl.Trainer(max_epochs=ROUNDS, callbacks=[server], **options).fit(module, datamodule=data())
    return {"model": dict(module.state_dict()), "history": [*server.history], "clients": [*server.clients]}


def main(folder: Path, strategy: Any, devices: int, nodes: int, cases: list[str], extra: dict[str, Any]) -> None:
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if fault := extra.pop("fault", None):
        faults = [Fault(*each[:2], getattr(signal, each[2]), folder / f"fault-{k}") for k, each in enumerate(fault)]
        extra["callbacks"] = faults
    if timeout := extra.pop("timeout", None):
        strategy = FederatedStrategy(timeout=timedelta(seconds=timeout))
    csv = extra.pop("csv", False)
    resume, forks = extra.pop("resume", None), extra.pop("fork", False)
    if forks:  # the fit is over in processes of its own, and this one has the model
        torch.save(_forked(cases[0], strategy, devices), folder / "forked.pt")
        return
    for name in cases:
        ckpt = {None: None, "last": "last"}.get(resume, resume and f"{resume}/{name}/last.ckpt")
        logger = {"logger": CSVLogger(folder / "csv", name=name)} if csv else {}
        found = fit(name, folder, ckpt, **logger, strategy=strategy, devices=devices, num_nodes=nodes, **dict(extra))
        torch.save(found, folder / f"{name}-{found['rank']}.pt")


if __name__ == "__main__":
    told = json.loads(sys.argv[1])
    known = [told.pop(name) for name in ("strategy", "devices", "nodes", "cases")]
    main(Path(told.pop("folder")), *known, told)
