"""Ways to write a step, an optimiser, a loss, a log."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import BaseFinetuning
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import Dataset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric, MetricCollection
from torchmetrics.classification import MulticlassAccuracy, MulticlassF1Score, MulticlassPrecision

from helpers.zoo.base import Entry, Manual, Tiny, federation, labelled, network
from lightning_fed import FederatedDataModule


class Stackable(Tiny):
    stackable = True


class Normed(Tiny):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3))


class Dropped(Tiny):
    def build(self) -> None:
        self.net = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 3))


class Mixup(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        x, y = batch
        share, order = np.random.beta(0.4, 0.4), torch.randperm(len(y))
        logits = self(share * x + (1 - share) * x[order])
        losses = [nn.functional.cross_entropy(logits, labels) for labels in (y, y[order])]
        return share * losses[0] + (1 - share) * losses[1]


class ByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(self.loss(batch))
        optimizer.step()


class AccumulatesByHand(Manual):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        self.manual_backward(self.loss(batch) / 2)
        if (batch_idx + 1) % 2 == 0 or self.trainer.is_last_batch:
            optimizer.step()
            optimizer.zero_grad()


class GAN(Manual):
    def build(self) -> None:
        super().build()
        self.generator, self.critic = nn.Linear(2, 4), nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1))
        del self.net

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, (opt_g, opt_d) = batch[0], self.optimizers()
        noise = torch.randn(len(real), 2, dtype=real.dtype)
        self.toggle_optimizer(opt_g)
        self.manual_backward(nn.functional.softplus(-self.critic(self.generator(noise))).mean())
        opt_g.step()
        opt_g.zero_grad()
        self.untoggle_optimizer(opt_g)
        self.toggle_optimizer(opt_d)
        fake = self.critic(self.generator(noise).detach())
        self.manual_backward((nn.functional.softplus(fake) + nn.functional.softplus(-self.critic(real))).mean())
        opt_d.step()
        opt_d.zero_grad()
        self.untoggle_optimizer(opt_d)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), lr=self.lr) for part in (self.generator, self.critic)]


class ClipsItself(Tiny):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        limit = 0.05 * (self.current_epoch + 1)
        self.clip_gradients(optimizer, gradient_clip_val=limit, gradient_clip_algorithm="norm")


class Adam(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), lr=0.01)


class Noisy(Tiny):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        for p in self.parameters():
            p.grad.add_(0.1 * torch.randn_like(p))


class Tied(Tiny):
    def build(self) -> None:
        self.encoder, self.decoder = nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False)
        self.decoder.weight = self.encoder.weight

    def loss(self, batch: Any) -> Tensor:
        return (self.decoder(torch.tanh(self.encoder(batch[0]))) - batch[0]).square().mean()


class FrozenBackbone(Tiny):
    def build(self) -> None:
        super().build()
        self.net[0].requires_grad_(False)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Unfreezes(FrozenBackbone):
    def on_train_epoch_start(self) -> None:
        if self.current_epoch >= 1:
            self.net[0].requires_grad_(True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Finetuned(Tiny):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=self.lr)


class Unfreeze(BaseFinetuning):
    def freeze_before_training(self, pl_module: pl.LightningModule) -> None:
        self.freeze(pl_module.net[0])

    def finetune_function(self, pl_module: pl.LightningModule, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(pl_module.net[0], optimizer, initial_denom_lr=2)


class Adapter(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down, self.up = nn.Linear(4, 1, bias=False), nn.Linear(1, 5, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.up(self.down(x))


class LoRA(FrozenBackbone):
    def build(self) -> None:
        self.net = network()
        self.net[0] = Adapter(self.net[0])


class MaxNorm(Tiny):
    def build(self) -> None:
        self.words, self.head = nn.Embedding(6, 4, max_norm=0.5), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.words(x).mean(1))


def tokens() -> FederatedDataModule:
    return federation(
        lambda n, g: TensorDataset(torch.randint(0, 6, (n, 4), generator=g), torch.randint(0, 3, (n,), generator=g))
    )


class Spectral(Tiny):
    def build(self) -> None:
        super().build()
        parametrizations.spectral_norm(self.net[0])


class WeightNorm(Tiny):
    def build(self) -> None:
        super().build()
        parametrizations.weight_norm(self.net[0])


class Measured(Tiny):
    def build(self) -> None:
        super().build()
        self.accuracy = MulticlassAccuracy(3)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.accuracy(self(batch[0]), batch[1])
        self.log("train_acc", self.accuracy, on_step=True, on_epoch=True)
        return self.loss(batch)


class Collected(Tiny):
    def build(self) -> None:
        super().build()
        parts = {"acc": MulticlassAccuracy(3), "f1": MulticlassF1Score(3), "prec": MulticlassPrecision(3)}
        self.metrics = MetricCollection(parts, prefix="train_")

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.metrics.update(self(batch[0]), batch[1])
        self.log_dict(self.metrics, on_step=False, on_epoch=True)
        return self.loss(batch)


class Template(Tiny):
    """As lightning-hydra-template writes a classifier."""

    def build(self) -> None:
        super().build()
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc, self.val_acc = (MulticlassAccuracy(3, average="micro") for _ in range(2))
        self.train_loss, self.val_loss, self.val_acc_best = MeanMetric(), MeanMetric(), MaxMetric()

    def on_train_start(self) -> None:
        for metric in (self.val_loss, self.val_acc, self.val_acc_best):
            metric.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        x, y = batch
        logits = self(x)
        return self.criterion(logits, y), logits.argmax(1), y

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, preds, targets = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(preds, targets)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, preds, targets = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(preds, targets)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)


class Logs(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        self.log("plain", loss)
        self.log("both", loss, on_step=True, on_epoch=True, prog_bar=True, batch_size=len(batch[1]))
        self.log("largest", loss, on_step=False, on_epoch=True, reduce_fx=torch.max)
        self.log("sum", loss.detach(), on_epoch=True, reduce_fx="sum", sync_dist=True)
        self.log_dict({"one": loss * 1, "two": loss * 2}, on_step=False, on_epoch=True)
        return loss


class Dicts(Tiny):
    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch["image"]), batch["label"])


class Rows(Dataset[dict[str, Tensor]]):
    def __init__(self, x: Tensor, y: Tensor) -> None:
        self.x, self.y = x, y

    def __len__(self) -> int:
        return len(self.y)

    def __getitem__(self, i: int) -> dict[str, Tensor]:
        return {"image": self.x[i], "label": self.y[i]}


class TakesOnlyBatch(Tiny):
    def training_step(self, batch: Any) -> Tensor:  # type: ignore[override]
        return self.loss(batch)


class ReturnsDict(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch), "size": len(batch[1])}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["size"] == len(batch[1])


class Skips(Tiny):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else self.loss(batch)


class TakesAnything(Tiny):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        (batch, index) = (*args, *kwargs.values())
        assert isinstance(index, int)
        return self.loss(batch)


class StopsEarly(Tiny):
    """Skips the rest of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        assert batch_idx < 2
        return self.loss(batch)


class ChangesBatches(Tiny):
    """Augments before the transfer, and after."""

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return [batch[0] + torch.randn_like(batch[0]), batch[1]]


class SkipsSteps(Tiny):
    """Steps the optimiser on every other batch only."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class StepsItsScheduler(Tiny):
    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.step()


class ZeroesItself(Tiny):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


#: Lightning says which of two implementations it takes, although the datamodule has none.
TWO_HOOKS = "You have overridden `on_.*_batch_transfer` in `LightningModule`"

STEPS = [
    Entry("plain classifier", Tiny),
    Entry("classifier that declares `stackable = True`", Stackable, "clients train side by side"),
    Entry("BatchNorm", Normed, "statistics follow `buffers`"),
    Entry("dropout", Dropped, "drawn from (seed, round, client, local epoch)"),
    Entry("mixup", Mixup, "drawn from (seed, round, client, local epoch), torch's and NumPy's numbers"),
    Entry("manual optimisation", ByHand),
    Entry("two optimisers (GAN)", GAN),
    Entry("`accumulate_grad_batches`", Tiny, "runs through a visit", trainer={"accumulate_grad_batches": 2}),
    Entry("accumulation by hand, with `trainer.is_last_batch`", AccumulatesByHand, "true at a visit's last batch"),
    Entry("clipping by norm", Tiny, trainer={"gradient_clip_val": 0.1}),
    Entry("clipping by value", Tiny, trainer={"gradient_clip_val": 0.02, "gradient_clip_algorithm": "value"}),
    Entry("`configure_gradient_clipping`", ClipsItself),
    Entry("Adam", Adam, "its memory starts empty in every visit"),
    Entry("noise in `on_before_optimizer_step`", Noisy),
    Entry("weight tying", Tied, "one parameter, sent once"),
    Entry("frozen backbone", FrozenBackbone, "neither sent nor averaged"),
    Entry("low-rank adapters (LoRA)", LoRA, "only adapters are sent"),
    Entry("backbone unfrozen in `on_train_epoch_start`", Unfreezes, "joins with its value of round 0"),
    Entry("`BaseFinetuning`", Finetuned, "joins with its value of round 0", callbacks=lambda: [Unfreeze()]),
    Entry("`Embedding(max_norm=...)`", MaxNorm, "evaluation does not renormalise what is trained", data=tokens),
    Entry("`spectral_norm`", Spectral, "its vectors follow `buffers`"),
    Entry("`weight_norm`", WeightNorm),
    Entry("torchmetrics", Measured, "states accumulate over the cohort"),
    Entry("`MetricCollection`", Collected, "states accumulate over the cohort"),
    Entry("classifier of lightning-hydra-template", Template, single="MaxMetric cannot be merged from parts"),
    Entry("`self.log` in its variants", Logs, "by round, over the cohort"),
    Entry("batches that are dicts", Dicts, data=lambda: federation(lambda n, g: Rows(*labelled(n, g)))),
    Entry("`training_step(batch)` without `batch_idx`", TakesOnlyBatch),
    Entry("`training_step(*args, **kwargs)`", TakesAnything),
    Entry("`training_step` returns a dict", ReturnsDict),
    Entry("`on_train_batch_start` returns -1", StopsEarly, "ends the visit"),
    Entry("batches changed in `on_before_batch_transfer` and after", ChangesBatches, quiet=TWO_HOOKS),
    Entry("`optimizer_step` that steps for some batches only", SkipsSteps),
    Entry("`lr_scheduler_step`", StepsItsScheduler, "called once per local step"),
    Entry("`optimizer_zero_grad` and `backward`", ZeroesItself),
    Entry("`training_step` returns None for some batches", Skips, "they make no step", quiet=".*returned `None`"),
]
