"""Modules that look at the clock: schedulers by step, and whatever depends on how far training has come."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.optim.lr_scheduler import ExponentialLR, LambdaLR, OneCycleLR, ReduceLROnPlateau, StepLR

from helpers.zoo.base import Entry, Manual, Tiny


class WarmsUp(Tiny):
    """The warm-up of Lightning's documentation: the rate is set after the step."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        optimizer.step(closure=optimizer_closure)
        if self.trainer.global_step < 5:
            scale = min(1.0, (self.trainer.global_step + 1) / 5.0)
            for group in optimizer.param_groups:
                group["lr"] = scale * self.lr


class Scheduled(Tiny):
    interval, frequency, monitor = "step", 1, None

    def scheduler(self, optimizer: Any) -> Any:
        raise NotImplementedError

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        config = {"scheduler": self.scheduler(optimizer), "interval": self.interval, "frequency": self.frequency}
        return {"optimizer": optimizer, "lr_scheduler": {**config, "monitor": self.monitor}}


class OneCycle(Scheduled):
    def scheduler(self, optimizer: Any) -> Any:
        total = int(self.trainer.estimated_stepping_batches)
        return OneCycleLR(optimizer, max_lr=self.lr, total_steps=total, cycle_momentum=False)


class Linear(Scheduled):
    """transformers' get_linear_schedule_with_warmup."""

    def scheduler(self, optimizer: Any) -> Any:
        warm_up, total = 2, self.trainer.estimated_stepping_batches

        def scale(step: int) -> float:
            if step < warm_up:
                return step / max(1, warm_up)
            return max(0.0, (total - step) / max(1, total - warm_up))

        return LambdaLR(optimizer, scale)


class Cosine(Scheduled):
    """transformers' get_cosine_schedule_with_warmup."""

    def scheduler(self, optimizer: Any) -> Any:
        warm_up, total = 1, self.trainer.estimated_stepping_batches

        def scale(step: int) -> float:
            if step < warm_up:
                return step / max(1, warm_up)
            progress = (step - warm_up) / max(1, total - warm_up)
            return max(0.0, 0.5 * (1.0 + math.cos(math.pi * progress)))

        return LambdaLR(optimizer, scale)


class Thirds(Scheduled):
    frequency = 3

    def scheduler(self, optimizer: Any) -> Any:
        return StepLR(optimizer, 1, 0.5)


class ByEpoch(Scheduled):
    interval = "epoch"

    def scheduler(self, optimizer: Any) -> Any:
        return ExponentialLR(optimizer, 0.5)


class Plateau(Scheduled):
    """A threshold that no loss can reach: every epoch is a plateau."""

    interval, monitor = "epoch", "train_loss"

    def scheduler(self, optimizer: Any) -> Any:
        return ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=10.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("train_loss", loss, on_step=False, on_epoch=True)
        return loss


class ScheduledByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr)
        return [optimizer], [ExponentialLR(optimizer, 0.5)]

    def on_train_epoch_end(self) -> None:
        self.lr_schedulers().step()


class ScheduledByHandInSteps(ScheduledByHand):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)
        self.lr_schedulers().step()

    def on_train_epoch_end(self) -> None:
        pass


class Anneals(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        divergence = self(batch[0]).square().mean()
        return self.loss(batch) + min(1.0, self.trainer.global_step / 4) * divergence


class AnnealsByHand(ScheduledByHand):
    def loss(self, batch: Any) -> Tensor:
        return super().loss(batch) * (1 + self.global_step)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    def on_train_epoch_end(self) -> None:
        pass


class Cools(Tiny):
    def loss(self, batch: Any) -> Tensor:
        x, y = batch
        return torch.nn.functional.cross_entropy(self(x) / 0.5**self.current_epoch, y)


class Progresses(Tiny):
    """The schedule of a gradient reversal, by the share of the run that is over."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        done = self.current_epoch * self.trainer.num_training_batches + batch_idx
        share = done / (self.trainer.max_epochs * self.trainer.num_training_batches)
        return self.loss(batch) * (2 / (1 + math.exp(-10 * share)))


ONE = "counts steps over the run: round * T + t"

CLOCKS = [
    Entry("warm-up in `optimizer_step`, by `trainer.global_step`", WarmsUp, ONE),
    Entry("`OneCycleLR` with `estimated_stepping_batches`", OneCycle, ONE),
    Entry("linear warm-up and decay (transformers)", Linear, ONE),
    Entry("cosine with warm-up (transformers)", Cosine, ONE),
    Entry("cosine with warm-up and accumulation", Cosine, ONE, trainer={"accumulate_grad_batches": 2}),
    Entry("`StepLR` by step, `frequency=3`", Thirds, ONE, steps=4),
    Entry("scheduler by epoch", ByEpoch, "steps once a round"),
    Entry("`ReduceLROnPlateau` by epoch", Plateau, "looks at the round's mean"),
    Entry("manual optimisation, scheduler stepped in `on_train_epoch_end`", ScheduledByHand, "steps once a round"),
    Entry("manual optimisation, scheduler stepped in `training_step`", ScheduledByHandInSteps, ONE),
    Entry("loss annealed by `trainer.global_step`", Anneals, ONE),
    Entry("loss annealed by `global_step`, manual optimisation", AnnealsByHand, ONE),
    Entry("temperature by `current_epoch`", Cools, "the round"),
    Entry("schedule by `trainer.num_training_batches`", Progresses, "T"),
]
