"""The product's own runs of an entry, and all that can be seen of them."""

from __future__ import annotations

import re
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from types import ModuleType
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection

from helpers.modules import quiet_trainer
from helpers.zoo import ZOO
from helpers.zoo.base import Entry
from helpers.zoo.oracle import SEED, State, state_of
from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback
from lightning_fed.sampling import Sampler

#: Everybody, then two of three, backwards.
COHORTS = ((0, 1, 2), (2, 0))

#: What Lightning says about itself in any of these runs, as in pyproject.toml.
TALK = "|".join(
    [
        r"`isinstance\(treespec, LeafSpec\)`",
        "You passed in a `val_dataloader` but have no `validation_step`",
        "You called `self.log.*but have no logger configured",
        "Total length of `list` across ranks is zero",
        ".*does not have many workers",
    ]
)


class Fixed(Sampler):
    """The cohorts that are given, in their order."""

    def __init__(self, cohorts: Sequence[Sequence[int]]) -> None:
        self.cohorts = cohorts

    def __repr__(self) -> str:
        return f"Fixed({self.cohorts})"

    def inclusion_probabilities(self, n: int) -> NDArray[np.float64]:
        return np.ones(n)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        raise NotImplementedError

    def cohort(self, n: int, seed: int, round: int) -> list[int]:
        return list(self.cohorts[round])


@dataclass(frozen=True, eq=False)
class Run:
    """The server's tensors after each round, what every visit ended with, and the rest."""

    rounds: list[State]
    visits: dict[tuple[int, Any], State]
    replies: dict[tuple[int, Any], Tensor]
    attributes: dict[str, Any]
    logged: dict[str, float]
    warned: list[str]
    traces: list[str]

    @property
    def state(self) -> State:
        return self.rounds[-1]


class Notes(FederatedCallback):
    """What rounds and visits leave; ``before`` and ``after`` stand around the evaluation."""

    def __init__(self) -> None:
        self.rounds: list[State] = []
        self.visits: dict[tuple[int, Any], State] = {}
        self.replies: dict[tuple[int, Any], Tensor] = {}

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        self.visits[visit.round, visit.client] = state_of(module)
        self.replies[visit.round, visit.client] = reply.x_i.clone()

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.rounds.append({})

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.close(pl_module)

    def close(self, module: pl.LightningModule) -> None:
        """The tensors of a round, when the module's own hooks are over."""
        if self.rounds:
            self.rounds[-1] = state_of(module)


class Look(FederatedCallback):
    def __init__(self) -> None:
        self.seen: list[dict[str, Any]] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        tensors = {f"tensor {name}": tensor for name, tensor in state_of(module).items()}
        modes = {f"mode of {name}": part.training for name, part in module.named_modules()}
        self.seen.append({**tensors, **modes, **attributes_of(module), "stream": torch.get_rng_state().clone()})


def federated(
    entry: Entry, cohorts: Sequence[Sequence[int]] = COHORTS, data: FederatedDataModule | None = None, **settings: Any
) -> Run:
    """Another run for each call."""
    options = {"engine": "sequential", "evaluate_every": 0, "figure": False, **settings}
    server = FederatedServer(FedAvg(), sampler=Fixed(cohorts), local_steps=entry.steps, seed=SEED, **options)
    notes, before, after = Notes(), Look(), Look()
    evaluation = [before, ClientEvaluation(), after] if server.evaluate_every else []
    callbacks = [notes, *evaluation, *entry.callbacks()]
    module = entry.make()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer = quiet_trainer(server, len(cohorts), callbacks=callbacks, num_sanity_val_steps=0, **entry.trainer)
        trainer.fit(module, datamodule=data or entry.data())
    notes.close(module)
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "federated/seconds"}
    ignored = TALK if entry.quiet is None else f"{TALK}|{entry.quiet}"
    warned = [text for text in (str(w.message) for w in caught) if not re.match(ignored, text)]
    changes = [
        name
        for old, new in zip(before.seen, after.seen, strict=True)
        for name in old.keys() | new.keys()
        if not same(old.get(name), new.get(name))
    ]
    assert len(before.seen) == (len(cohorts) if server.evaluate_every else 0)
    return Run(notes.rounds, notes.visits, notes.replies, attributes_of(module), logged, warned, changes)


@cache
def _cached(name: str, cohorts: Any, settings: tuple[tuple[str, Any], ...]) -> Run:
    (entry,) = [entry for entry in ZOO if entry.name == name]
    return federated(entry, cohorts, **dict(settings))


def run(entry: Entry, cohorts: Sequence[Sequence[int]] = COHORTS, **settings: Any) -> Run:
    """The same run for the same settings."""
    return _cached(entry.name, cohorts, tuple(sorted(settings.items())))


# -- attributes -------------------------------------------------------------------------------------------------------

_BOOKS = frozenset(vars(nn.Module()))
_LIGHTNINGS = frozenset(vars(pl.LightningModule())) | {"_metric_attributes", "_param_requires_grad_state"}
_METRICS = frozenset({"update", "compute", "_cache"})


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Every attribute of a module and its parts, as something that can be compared later."""
    return {
        f"{prefix}.{key}".lstrip("."): _frozen(value)
        for prefix, part in module.named_modules()
        for key, value in vars(part).items()
        if key not in _BOOKS | _LIGHTNINGS and not (isinstance(part, Metric) and key in _METRICS)
        if not (isinstance(part, MetricCollection) and key in ("_groups", "_groups_checked", "_state_is_copy"))
    }


def _frozen(value: Any, depth: int = 5) -> Any:
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, np.random.Generator):
        return repr(value.bit_generator.state)
    if isinstance(value, nn.Module):
        return state_of(value)
    if isinstance(value, dict):
        return {key: _frozen(entry, depth - 1) for key, entry in value.items()} if depth else None
    if isinstance(value, list | tuple):
        return [_frozen(entry, depth - 1) for entry in value] if depth else None
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if (
        isinstance(value, type | ModuleType | torch.optim.Optimizer)
        or callable(value)
        or not hasattr(value, "__dict__")
    ):
        return type(value).__name__
    return _frozen(vars(value), depth - 1) if depth else None


def same(left: Any, right: Any) -> bool:
    """Bitwise."""
    if isinstance(left, Tensor):
        return isinstance(right, Tensor) and left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return isinstance(right, dict) and left.keys() == right.keys() and all(same(left[k], right[k]) for k in left)
    if isinstance(left, list):
        return isinstance(right, list) and len(left) == len(right) and all(map(same, left, right))
    return bool(left == right) or (left != left and right != right)
