"""Try learning rates on the training data of a few clients; leaves nothing behind."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from lightning_fed.algorithms import FedAvg
from lightning_fed.core.layout import Layout, average_buffers, overwrite, parameters_of
from lightning_fed.core.memory import ClientId
from lightning_fed.core.messages import Broadcast
from lightning_fed.data.partition import labels_of
from lightning_fed.engines import DivergenceError
from lightning_fed.engines.sequential import SequentialEngine
from lightning_fed.evaluation.evaluate import client_losses
from lightning_fed.lightning import isolate_rng, pl
from lightning_fed.local.server_snapshot import Workspace
from lightning_fed.trainer.data_streams import undisturbed
from lightning_fed.trainer.hooks import Visit

#: Of two learning rates whose losses fall alike, up to this share of the fall, the smaller is chosen.
ALIKE = 0.01

#: The most learning rates that a trial tries.
MOST = 7


@dataclass(frozen=True)
class Tried:
    """One learning rate: mean training ``loss`` of the clients after their last visit, inf if a visit diverged."""

    lr: float
    loss: float
    seconds: float


@dataclass(frozen=True)
class TrialResult:
    """What a trial found.

    Args:
        start: mean training loss of the clients at the first model.
        constant: what the frequencies of a client's own classes alone give, in nats, as a mean; NaN without classes.
        tried: the learning rates, in the order in which they were tried; the first is the run's own.
        rounds: number of visits of every client.
        clients: number of clients.
    """

    start: float
    constant: float
    tried: list[Tried]
    rounds: int
    clients: int

    @property
    def best(self) -> Tried:
        """The learning rate with the lowest loss; the smaller of two whose losses fall alike."""
        lowest = min(one.loss for one in self.tried)
        alike = [one for one in self.tried if one.loss <= lowest + ALIKE * max(0.0, self.start - lowest)]
        return min(alike, key=lambda one: one.lr)

    @property
    def conclusive(self) -> bool:
        """Whether a loss fell, and below what a model gives that knows nothing but a client's frequencies of classes.

        Above it, large steps look good because they reach that plateau first, and then stay on it.
        """
        return self.best.loss < self.start and not self.best.loss >= self.constant  # the constant may be NaN

    @property
    def learns_at_own(self) -> bool:
        """Whether the run's own learning rate lowers the loss."""
        return self.tried[0].loss < self.start


def neighbours(lr: float) -> tuple[float, float]:
    """The nearest of ..., 0.03, 0.1, 0.3, 1, ... that are clearly below and above a learning rate.

    >>> neighbours(0.01), neighbours(0.1), neighbours(0.02)
    ((0.003, 0.03), (0.03, 0.3), (0.01, 0.1))
    """
    power = math.floor(math.log10(lr))
    grid = [float(f"{digit}e{power + shift}") for shift in (-2, -1, 0, 1, 2) for digit in (1, 3)]
    return max(x for x in grid if x < lr / 1.7), min(x for x in grid if x > lr * 1.7)


def entropy(labels: NDArray[Any]) -> float:
    """The least mean cross entropy of a model that ignores its inputs, in nats; NaN for targets that are no classes.

    >>> round(entropy(np.array([1, 1, 7, 7])), 4), entropy(np.array([0.1, 0.2]))
    (0.6931, nan)
    """
    if np.issubdtype(labels.dtype, np.floating) and not np.array_equal(labels, np.rint(labels)):
        return math.nan
    share = np.unique(labels, return_counts=True)[1] / labels.size
    return float(-(share * np.log(share)).sum())


class LearningRateTrial:
    """Rounds of FedAvg among a few clients, with several learning rates from the same first model.

    A learning rate is judged by the mean of the clients' training losses, each after its own last visit. The search
    climbs: from the run's own learning rate upwards while the loss falls, else downwards.

    Args:
        trainer: is in ``on_train_start`` of a fit with a ``FederatedServer``.
        clients: the clients that take part.
        rounds: number of visits of each.
        tell: is given a line of text after each learning rate.
    """

    def __init__(self, trainer: pl.Trainer, clients: Sequence[ClientId], rounds: int, tell: Any) -> None:
        self.trainer, self.clients, self.rounds, self.tell = trainer, clients, rounds, tell
        loop: Any = trainer.fit_loop
        self.layout = Layout.of(trainer.lightning_module, loop.server.personal)
        self.x0 = self.layout.flatten(parameters_of(trainer.lightning_module)).clone()
        self.rates = [  # with a scheduler, those before it began, such as at the end of a warm-up
            [float(group.get("initial_lr", group["lr"])) for group in optimizer.param_groups]
            for optimizer in trainer.optimizers
        ]

    @property
    def lr(self) -> float:
        """The largest learning rate of the run's optimisers, which stands for all of them."""
        return max((lr for rates in self.rates for lr in rates), default=0.0)

    def run(self) -> TrialResult:
        with self._undone() as self._first:
            start = self._loss(self.clients)
            tried = [self._try(self.lr, start)]
            for side in (1, 0):
                last = self._climb(tried, side, start)
                if last is not tried[0]:
                    break  # upwards was better, so that downwards is worse
        return TrialResult(start, self._constant(), tried, self.rounds, len(self.clients))

    def _climb(self, tried: list[Tried], side: int, start: float) -> Tried:
        """Try learning rates above or below the first while the loss falls; the last that was better."""
        last = tried[0]
        while len(tried) < MOST:
            tried.append(found := self._try(neighbours(last.lr)[side], start))
            if found.loss >= last.loss:
                break
            last = found
        return last

    def _try(self, lr: float, start: float) -> Tried:
        began, loss = time.monotonic(), math.inf
        try:
            x, buffers = self.x0, None
            for round in range(self.rounds):
                x, buffers, loss = self._round(round, lr, x, buffers)
        except DivergenceError:
            loss = math.inf
        found = Tried(lr, loss if math.isfinite(loss) else math.inf, time.monotonic() - began)
        self.tell(f"  lr {lr:g}: training loss {start:.3g} -> {found.loss:.3g} ({found.seconds:.0f} s)")
        return found

    def _round(self, round: int, lr: float, x: Tensor, buffers: Any) -> tuple[Tensor, Any, float]:
        """Visit every client; the mean of their models and buffers, and the mean of their own losses."""
        trainer: Any = self.trainer
        self._first.reset(buffers)
        self._set(lr)
        engine = SequentialEngine(trainer.fit_loop.epoch_loop.client_loop, self._workspace(), self.layout, round)
        total, losses, plain = torch.zeros_like(x, dtype=torch.float64), [], FedAvg()
        for position, cid in enumerate(self.clients):
            visit = Visit(round, cid, position, len(self.clients))
            reply: Any = engine.visit(plain.client_step, plain.init_client(x), Broadcast(x), visit)
            losses.append(self._loss([cid]))  # the module holds the client's model
            total += reply.x_i
        states = [dict(engine.left[cid].shared) for cid in self.clients]
        averaged = average_buffers((1.0, state) for state in states) if any(states) else None
        return (total / len(self.clients)).to(x.dtype), averaged, sum(losses) / len(losses)

    def _workspace(self) -> Workspace:
        loop: Any = self.trainer.fit_loop
        return Workspace(self.trainer, personal=loop.server.personal)

    def _set(self, lr: float) -> None:
        """Scale the learning rates of all optimisers; ``lr`` becomes the largest."""
        scale = lr / self.lr
        for optimizer, rates in zip(self.trainer.optimizers, self.rates, strict=True):
            for group, own in zip(optimizer.param_groups, rates, strict=True):
                group["lr"] = own * scale

    def _loss(self, ids: Sequence[ClientId]) -> float:
        losses = client_losses(self.trainer, "train", ids)
        return sum(losses.values()) / len(losses)

    def _constant(self) -> float:
        """The mean loss of models that know a client's frequencies of classes alone; NaN if there are no classes."""
        data: Any = self.trainer.datamodule
        found = []
        for cid in self.clients:
            with undisturbed(data, cid, "train"), isolate_rng():
                try:
                    found.append(entropy(labels_of(data.client_dataset(cid))))
                except ValueError:
                    return math.nan
        return sum(found) / len(found)

    @contextmanager
    def _undone(self) -> Iterator[Workspace]:
        """Hold learning rates still, and restore module, optimisers and schedulers afterwards."""
        strategy = self.trainer.strategy
        first, schedulers = Workspace(self.trainer), strategy.lr_scheduler_configs
        strategy.lr_scheduler_configs = []
        try:
            yield Workspace(self.trainer)
        finally:
            strategy.lr_scheduler_configs = schedulers
            first.reset()
            overwrite(parameters_of(self.trainer.lightning_module), self.layout.split(self.x0))
