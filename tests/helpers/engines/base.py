"""Rows of the matrix engine x module: what is trained, and what each way to train makes of it."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import pytorch_lightning as pl
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from helpers.modules import Net, classification, quiet_trainer
from helpers.stacks import memories
from helpers.zoo.runs import TALK
from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.local.native.codegen.program import Steps

#: The columns of the matrix: every way to train, as settings of the server.
WAYS: dict[str, dict[str, Any]] = {
    "lightning": {"engine": "sequential"},  # with a callback for which Lightning's own loop makes every step
    "lean": {"engine": "sequential"},
    "recorded": {"engine": "vectorized", "compile": False},
    "in C": {"engine": "vectorized", "compile": True},
    "workers": {"engine": "sequential", "workers": 2},
    "auto": {"engine": "auto"},
}
ONE_BY_ONE = ("lean", "workers")
STACKED = ("recorded", "in C")


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
    """Clients of 9, 10, 11, ... samples: batches of 4 leave short ones."""
    plain = classification(clients, **kwargs)
    for split in plain.splits.values():
        for cid, dataset in split.items():
            assert isinstance(dataset, TensorDataset)
            split[cid] = TensorDataset(dataset.tensors[0].double(), dataset.tensors[1])
    return plain


@dataclass(frozen=True, eq=False)
class Row:
    """A module and its surroundings, which an engine may get wrong.

    Args:
        name: of the row.
        make: the module, with the same weights whenever it is made.
        algorithm: whose questions clients answer.
        data: the clients.
        rounds: of the fit.
        options: of the server.
        trainer: options of the Trainer.
        callbacks: of the Trainer, made anew for each fit.
        ways: the columns in which the row is tried.
        alone: why clients cannot be trained side by side, as the refusal of ``engine="vectorized"`` says.
        warns: the warning that comes, as a regular expression, by way or for ``"all"`` of them.
        patches: attributes of the package that have other values during the fit.
        in_c: whether steps in C are written in C, or None where this is not looked at.
        tolerance: of everything that server and clients remember.
        logs: names that are logged in every round.
        slow: whether `make quick` leaves the row out.
    """

    name: str
    make: Callable[[], pl.LightningModule]
    algorithm: Algorithm = field(default_factory=lambda: FedADMM(eta=0.5))
    data: Callable[[], FederatedDataModule] = data
    rounds: int = 2
    options: Mapping[str, Any] = field(default_factory=dict)
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    ways: Sequence[str] = (*ONE_BY_ONE, *STACKED)
    alone: str | None = None
    warns: Mapping[str, str] = field(default_factory=dict)
    patches: Mapping[str, Any] = field(default_factory=dict)
    in_c: bool | None = None
    tolerance: float = 1e-10
    logs: frozenset[str] = frozenset()
    slow: bool = False


@dataclass(frozen=True, eq=False)
class Run:
    """All that can be seen of a fit.

    Args:
        memory: everything that server and clients remember, by name.
        logged: what is known after each round, but for how long it took.
        warned: warnings, but for Lightning's about itself.
        told: messages of the log, and of the choice of an engine.
        calls: the number of clients in each call of C code.
    """

    memory: dict[str, Tensor]
    logged: list[dict[str, float]]
    warned: list[str]
    told: list[str]
    calls: list[int]


class Listener(pl.Callback):
    """Has to be called, so that Lightning's own loop makes the steps."""

    def on_after_backward(self, *_: Any) -> None:
        pass


class Logged(FederatedCallback):
    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = trainer.callback_metrics.items()
        self.rounds.append({name: float(value) for name, value in known if name != "federated/seconds"})


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.texts: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.texts.append(record.getMessage())


@cache
def run(row: Row, way: str) -> Run:
    """The same run for the same row and way."""
    module, logged, told, calls = row.make(), Logged(), _Messages(), list[int]()
    if way == "auto":  # which stacks only what declares that it may be stacked
        kind = type(module)
        module.__class__ = type(kind.__name__, (kind,), {"stackable": True})
    callbacks = [logged, *row.callbacks(), *([Listener()] if way == "lightning" else [])]
    options = {"local_steps": 3, "seed": 3, "evaluate_every": 0, "figure": False, **row.options, **WAYS[way]}
    log, call = logging.getLogger("lightning_fed"), Steps.__call__
    level = log.level

    def counted(self: Steps, client: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        calls.append(len(client[0]))
        return call(self, client, *rest)

    log.addHandler(told)
    log.setLevel(logging.INFO)
    try:
        with warnings.catch_warnings(record=True) as caught, pytest.MonkeyPatch.context() as patch:
            warnings.simplefilter("always")
            patch.setattr(Steps, "__call__", counted)
            for module_name in ("engines.selection", "local.stacked.recorder"):  # Lightning's own log
                patch.setattr(f"lightning_fed.{module_name}.rank_zero_info", told.texts.append)
            for name, value in row.patches.items():
                patch.setattr(name, value)
            server = FederatedServer(row.algorithm, **options)
            quiet_trainer(server, row.rounds, callbacks=callbacks, **row.trainer).fit(module, datamodule=row.data())
    finally:
        log.removeHandler(told)
        log.setLevel(level)
    warned = [text for text in (str(w.message) for w in caught) if not re.match(TALK, text)]
    memory = {name: tensor.clone() for name, tensor in memories(server).items()}  # not in the memory of workers
    return Run(memory, logged.rounds, warned, told.texts, calls)
