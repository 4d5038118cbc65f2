"""What a visit may change besides what it trains: frozen parameters, buffers, attributes."""

from __future__ import annotations

import copy
import itertools
import threading
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from helpers.zoo.base import Entry, Tiny, network


@torch.no_grad()
def follow(slow: nn.Module, fast: nn.Module, share: float = 0.2) -> None:
    for old, new in zip(slow.parameters(), fast.parameters(), strict=True):
        old.lerp_(new, share)


# -- parameters that are not trained but move ------------------------------------------------------------------------


class MomentumEncoder(Tiny):
    """BYOL's and MoCo's: the target moves in the step, before the loss."""

    def build(self) -> None:
        super().build()
        self.target = copy.deepcopy(self.net).requires_grad_(False)
        self.untouched = nn.Parameter(torch.tensor([0.1, 0.7]), requires_grad=False)

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (self(batch[0]) - self.target(batch[0])).square().mean()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if self.training:
            follow(self.target, self.net)
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


class MeanTeacher(MomentumEncoder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        follow(self.target, self.net)


class MovesInOptimizerStep(MomentumEncoder):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
        super().optimizer_step(*args, **kwargs)
        follow(self.target, self.net)


class Queue(MeanTeacher):
    """MoCo's: a ring of keys, and where it is written next."""

    def build(self) -> None:
        super().build()
        self.register_buffer("queue", torch.zeros(8, 3))
        self.register_buffer("pointer", torch.zeros(1, dtype=torch.long))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch) + 0.1 * (self(batch[0]) @ self.queue.clone().T).square().mean()
        with torch.no_grad():
            rows = (int(self.pointer) + torch.arange(len(batch[1]))) % 8
            self.queue[rows] = self.target(batch[0])
            self.pointer[0] = (int(self.pointer) + len(batch[1])) % 8
        return loss


class Centre(Tiny):
    """DINO's centre, kept as a frozen parameter."""

    def build(self) -> None:
        super().build()
        self.centre = nn.Parameter(torch.zeros(3), requires_grad=False)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        logits = self(batch[0])
        loss = nn.functional.cross_entropy(logits - self.centre, batch[1])
        self.centre.data = 0.8 * self.centre + 0.2 * logits.detach().mean(0)
        return loss


class Averaged(Tiny):
    """SWA by hand: torch's AveragedModel, made of frozen parameters."""

    def build(self) -> None:
        super().build()
        self.average = AveragedModel(self.net).requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=self.lr)


class AveragesBatches(Averaged):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.average.update_parameters(self.net)


class AveragesEpochs(Averaged):
    def on_train_epoch_end(self) -> None:
        self.average.update_parameters(self.net)


class AveragesEpochsTrainably(AveragesEpochs):
    """Nobody froze the copy, so it is a part of x."""

    def build(self) -> None:
        super().build()
        self.average.requires_grad_(True)


# -- trained parameters that are clamped -----------------------------------------------------------------------------


class ClampsBatches(Tiny):
    limit = 0.2

    @torch.no_grad()
    def clamp(self) -> None:
        for p in self.parameters():
            p.clamp_(-self.limit, self.limit)

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.clamp()


class ClampsAtEpochEnd(ClampsBatches):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_end(self) -> None:
        self.clamp()


class ClampsAtEpochStart(ClampsBatches):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        pass

    def on_train_epoch_start(self) -> None:
        self.clamp()


# -- attributes ------------------------------------------------------------------------------------------------------


class Counts(Tiny):
    def build(self) -> None:
        super().build()
        self.count = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.count += 1
        return self.loss(batch) / self.count


class RunningMean(Tiny):
    def build(self) -> None:
        super().build()
        self.mean = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean = 0.9 * self.mean + 0.1 * loss.detach()
        return loss * (1 + self.mean)


class RunningMeanInPlace(RunningMean):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.mean.mul_(0.9).add_(0.1 * loss.detach())
        return loss * (1 + self.mean.clone())


class Part(nn.Module):
    """A layer that scales what it sees by how much it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.seen = {"samples": 0}

    def forward(self, x: Tensor) -> Tensor:
        self.seen["samples"] += len(x)
        return x * (1 + 0.01 * self.seen["samples"])


class CountsInAPart(Tiny):
    def build(self) -> None:
        super().build()
        self.net.insert(0, Part())


class Recurrent(Tiny):
    def build(self) -> None:
        self.rnn, self.head = nn.LSTM(2, 3, batch_first=True), nn.Linear(3, 3)
        self.hidden: Any = None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        output, hidden = self.rnn(batch[0].view(-1, 2, 2), self.hidden)
        self.hidden = tuple(h.detach() for h in hidden)
        return nn.functional.cross_entropy(self.head(output[:, -1]), batch[1])


class KeepsScheduler(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        self.scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)
        return optimizer

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.scheduler.step()  # before the step: the rate of every batch is that of the scheduler, whoever restores it


class Replays(Tiny):
    def build(self) -> None:
        super().build()
        self.memory: list[Any] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for old in self.memory:
            loss = loss + 0.1 * self.loss(old)
        self.memory.append([part.clone() for part in batch])
        return loss


class ReplaysTheLast(Replays):
    """Only of a list that held something can it be seen that more was done to it than appending."""

    def build(self) -> None:
        super().build()
        blank = [torch.zeros(2, 4, dtype=torch.float64), torch.zeros(2, dtype=torch.long)]
        self.memory = [blank, blank]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if len(self.memory) > 2:
            self.memory.pop(0)
        return loss


class HidesTeacher(Tiny):
    """A list keeps the teacher out of parameters() and out of checkpoints."""

    def build(self) -> None:
        super().build()
        self.teacher = [network().double().requires_grad_(False)]

    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) + (self(batch[0]) - self.teacher[0](batch[0])).square().mean()


class MovesHiddenTeacher(HidesTeacher):
    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        follow(self.teacher[0], self.net)


class DrawsItself(Tiny):
    def build(self) -> None:
        super().build()
        self.rng = np.random.default_rng(0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) * self.rng.uniform(0.5, 1.5)


class CollectsOutputs(Tiny):
    """Lightning's own advice since 2.0; what is collected ends up in a buffer, where it can be seen."""

    def build(self) -> None:
        super().build()
        self.training_step_outputs: list[Tensor] = []
        self.register_buffer("summary", torch.zeros(9))

    @property
    def outputs(self) -> list[Tensor]:
        return self.training_step_outputs

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.outputs.append(loss.detach())
        return loss

    def on_train_epoch_end(self) -> None:
        losses = torch.stack(self.outputs)
        self.summary.zero_()
        self.summary[: len(losses)] = losses
        self.outputs.clear()


class CollectsInADict(CollectsOutputs):
    def build(self) -> None:
        super().build()
        self.collected: dict[str, list[Tensor]] = {"train": [], "val": []}

    @property
    def outputs(self) -> list[Tensor]:
        return self.collected["train"]


class Locks(Tiny):
    def build(self) -> None:
        super().build()
        self.lock = threading.Lock()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        with self.lock:
            return self.loss(batch)


class Numbers(Tiny):
    def build(self) -> None:
        super().build()
        self.numbers = (i for i in itertools.count())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert next(self.numbers) >= 0
        return self.loss(batch)


class CountsEpochs(Tiny):
    """Changes an attribute between rounds, where the module is the server's."""

    def build(self) -> None:
        super().build()
        self.epochs = 0

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch) / (1 + self.epochs)

    def on_train_epoch_end(self) -> None:
        self.epochs += 1


MOVES = "follows `buffers`"
ANEW = "every visit starts from the server's; register a buffer to keep it"
JOINED = "entries are joined in the order of the cohort"
REMEDY = "`g=Box(...)`, or `on_train_batch_end`"

STATE = [
    Entry("momentum encoder that moves in `training_step` (BYOL, MoCo)", MomentumEncoder, MOVES),
    Entry("momentum encoder that moves in `on_train_batch_end` (mean teacher)", MeanTeacher, MOVES),
    Entry("momentum encoder that moves in `optimizer_step`", MovesInOptimizerStep, MOVES),
    Entry("MoCo's queue and its pointer, as buffers", Queue, "the mean of the queues, the largest pointer"),
    Entry("DINO's centre as a frozen parameter", Centre, MOVES),
    Entry("SWA copy, by batch", AveragesBatches, MOVES),
    Entry("SWA copy, by epoch", AveragesEpochs, "averages the server's models", ends_rounds=True),
    Entry(
        "SWA copy, by epoch, with `requires_grad=True`",
        AveragesEpochsTrainably,
        "freeze the copy",
        refused=r"average.module.0.weight",
    ),
    Entry("weights clamped in `on_train_batch_end`", ClampsBatches),
    Entry("weights clamped in `on_train_epoch_end`", ClampsAtEpochEnd, REMEDY, refused=r"net.0.weight"),
    Entry("weights clamped in `on_train_epoch_start`", ClampsAtEpochStart, REMEDY, refused=r"net.0.weight"),
    Entry("counter", Counts, ANEW, dropped="count of Counts"),
    Entry("running mean in a tensor", RunningMean, ANEW, dropped="mean of RunningMean"),
    Entry("running mean in a tensor, in place", RunningMeanInPlace, ANEW, dropped="mean of RunningMeanInPlace"),
    Entry("counter in a dict of a layer", CountsInAPart, ANEW, dropped="seen of Part"),
    Entry("hidden state of an LSTM", Recurrent, ANEW, dropped="hidden of Recurrent"),
    Entry(
        "scheduler in an attribute",
        KeepsScheduler,
        ANEW,
        dropped="scheduler of KeepsScheduler",
        quiet="Detected call of `lr_scheduler.step",
    ),
    Entry("list that a step appends to and reads (replay)", Replays, JOINED, lists=lambda module: [module.memory]),
    Entry("list that a step appends to and cuts", ReplaysTheLast, ANEW, dropped="memory of ReplaysTheLast"),
    Entry("teacher hidden in a list", HidesTeacher),
    Entry("teacher hidden in a list, which moves", MovesHiddenTeacher, ANEW, dropped="teacher of MovesHiddenTeacher"),
    Entry("NumPy generator", DrawsItself, ANEW + "; or draw from the global streams", dropped="rng of DrawsItself"),
    Entry(
        "`training_step_outputs`, read in `on_train_epoch_end`",
        CollectsOutputs,
        JOINED,
        lists=lambda module: [module.outputs],
        ends_rounds=True,
    ),
    Entry(
        "outputs in a dict of lists, read in `on_train_epoch_end`",
        CollectsInADict,
        JOINED,
        lists=lambda module: [module.outputs],
        ends_rounds=True,
    ),
    Entry("lock", Locks, "passes from client to client", uncopyable="lock of Locks"),
    Entry("open generator", Numbers, "passes from client to client", uncopyable="numbers of Numbers"),
    Entry(
        "attribute that `on_train_epoch_end` changes",
        CountsEpochs,
        "is the server's",
        prepare=lambda module, round: setattr(module, "epochs", round),
    ),
]
