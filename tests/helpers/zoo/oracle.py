"""FedAvg written by hand around a plain Trainer per visit, beside the product's own run.

A visit of round k is a fresh module under a stock ``Trainer(max_epochs=rounds, limit_train_batches=T)`` that Lightning
itself resumes at epoch k, with the server's tensors in it. Of the product it uses the draws of docs/draws.md alone.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor

from helpers.drawn import batches
from helpers.modules import quiet_trainer
from helpers.zoo.base import Entry
from lightning_fed import FederatedDataModule

SEED = 5
State = dict[str, Tensor]


def state_of(module: torch.nn.Module) -> State:
    """All parameters and buffers."""
    own = [*module.named_parameters(), *module.named_buffers()]
    return {name: tensor.detach().clone() for name, tensor in own}


@torch.no_grad()
def put(module: torch.nn.Module, state: State) -> None:
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        tensor.copy_(state[name])


class Batches:
    """The batches of a client, a round after another, with the random numbers that go with them."""

    def __init__(self, data: FederatedDataModule, cid: Any, steps: int) -> None:
        self.data, self.cid, self.steps = data, cid, steps
        self.trainer: pl.Trainer | None = None

    def __len__(self) -> int:
        return self.steps

    def __iter__(self) -> Iterator[Any]:
        assert self.trainer is not None
        # not before the first batch is due: to estimate its steps, a Trainer asks before it knows where to go on
        yield from batches(self.data, self.cid, SEED, self.trainer.current_epoch, self.steps)


class Epochs(pl.Callback):
    """Optimisers without memory at the start of every epoch; the end after ``until`` epochs of the whole run."""

    def __init__(self, until: int) -> None:
        self.until = until

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        for optimizer in trainer.optimizers:
            optimizer.state.clear()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.should_stop = trainer.current_epoch + 1 >= self.until


class Visit(Epochs):
    """Begins with the server's tensors and lists, and notes what has become of them, before the epoch's last hooks."""

    def __init__(self, entry: Entry, round: int, begin: State, lists: list[list[Any]]) -> None:
        super().__init__(round + 1)
        self.entry, self.begin, self.lists = entry, begin, lists
        self.end: State = {}
        self.trained: set[str] = set()
        self.appended: list[list[Any]] = []

    def on_train_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        put(pl_module, self.begin)
        for own, begun in zip(self.entry.lists(pl_module), self.lists, strict=True):
            own[:] = begun

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        super().on_train_epoch_end(trainer, pl_module)
        self.end = state_of(pl_module)
        self.trained = {name for name, p in pl_module.named_parameters() if p.requires_grad}
        pairs = zip(self.entry.lists(pl_module), self.lists, strict=True)
        self.appended = [own[len(begun) :] for own, begun in pairs]


def plainly(
    entry: Entry, data: FederatedDataModule, cid: Any, rounds: int, callback: pl.Callback, **fit: Any
) -> tuple[pl.Trainer, pl.LightningModule]:
    """A stock Trainer on a client's batches."""
    loader, module = Batches(data, cid, entry.steps), entry.make()
    entry.prepare(module, fit.pop("round", 0))
    options = {"callbacks": [callback, *entry.callbacks()], "limit_train_batches": entry.steps, **entry.trainer}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        loader.trainer = trainer = quiet_trainer(None, rounds, limit_val_batches=0, **options)
        trainer.fit(module, train_dataloaders=loader, **fit)
    return trainer, module


def alone(entry: Entry, data: FederatedDataModule, cid: Any, rounds: int) -> State:
    """What one Trainer makes of a lone client in so many epochs."""
    return state_of(plainly(entry, data, cid, rounds, Epochs(rounds))[1])


@dataclass
class Oracle:
    """The server's tensors after every round, and those of every visit."""

    rounds: list[State]
    visits: dict[tuple[int, Any], State]
    trained: set[str]


@cache
def federate(entry: Entry, cohorts: Sequence[Sequence[int]], buffers: str = "average") -> Oracle:
    """FedAvg by number of samples; what is not trained follows the policy."""
    data, rounds = entry.data(), len(cohorts)
    server = entry.make()
    state, lists = state_of(server), [list(own) for own in entry.lists(server)]
    told = Oracle([], {}, set())
    own: dict[Any, State] = {}
    for k, cohort in enumerate(cohorts):
        visits = {}
        resume = _checkpoint(entry, data, rounds, k) if k else {}
        for cid in (data.client_ids[i] for i in cohort):
            frozen = {name: t for name, t in own.get(cid, {}).items() if name not in told.trained}
            visits[cid] = visit = Visit(entry, k, {**state, **frozen}, lists)
            plainly(entry, data, cid, rounds, visit, round=k, **resume)
            told.visits[k, cid], told.trained = visit.end, visit.trained
            if buffers == "local":
                own[cid] = visit.end
        mean = _mean({cid: visit.end for cid, visit in visits.items()}, data)
        moves = {name for name in state if name in told.trained or buffers == "average"}
        state = {name: mean[name] if name in moves else state[name] for name in state}
        appended = [visit.appended for visit in visits.values()]
        lists = [[*before, *(x for own in appended for x in own[i])] for i, before in enumerate(lists)]
        if entry.ends_rounds:
            state, lists = _end_round(entry, state, lists)
        told.rounds.append(state)
    return told


def _checkpoint(entry: Entry, data: FederatedDataModule, rounds: int, epoch: int) -> dict[str, Any]:
    """Where a Trainer is after so many epochs: what time it is, and how far schedulers have come."""
    trainer, _ = plainly(entry, data, data.client_ids[0], rounds, Epochs(epoch))
    path = Path(f"epoch{epoch}.ckpt")
    trainer.save_checkpoint(path)
    return {"ckpt_path": path, "weights_only": False}


def _mean(ends: dict[Any, State], data: FederatedDataModule) -> State:
    weights = {cid: data.num_examples(cid) for cid in ends}
    total = sum(weights.values())
    mean: State = {}
    for name, first in next(iter(ends.values())).items():
        values = [end[name] for end in ends.values()]
        if first.is_floating_point():
            mean[name] = sum(w * value for w, value in zip(weights.values(), values, strict=True)) / total
        else:
            mean[name] = torch.stack(values).amax(0)
    return mean


def _end_round(entry: Entry, state: State, lists: list[list[Any]]) -> tuple[State, list[list[Any]]]:
    server = entry.make()
    put(server, copy.deepcopy(state))
    for own, joined in zip(entry.lists(server), lists, strict=True):
        own[:] = joined
    server.on_train_epoch_end()
    return state_of(server), [list(own) for own in entry.lists(server)]
