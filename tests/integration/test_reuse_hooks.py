"""Steps and hooks as any Lightning user may write them: what Lightning promises about them holds in a visit."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import classification, quiet_trainer, x_of
from helpers.reuse import SEED, Plain, Visits, alone
from torch import Tensor

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg


class ReturnsDict(Plain):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> dict[str, Any]:
        return {"loss": self.loss(batch), "size": len(batch[1]), "note": "kept"}

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        assert outputs["size"] == len(batch[1])
        assert outputs["note"] == "kept"


class TakesOnlyBatch(Plain):
    def training_step(self, batch: list[Tensor]) -> Tensor:
        return self.loss(batch)


class TakesAnything(Plain):
    def training_step(self, *args: Any, **kwargs: Any) -> Tensor:
        (batch, index) = (*args, *kwargs.values())
        assert isinstance(index, int)
        return self.loss(batch)


class StopsEarly(Plain):
    """Skips the rest of an epoch."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 2 else None

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        assert batch_idx < 2
        return self.loss(batch)


class ChangesBatches(Plain):
    """Augments before the transfer, and after."""

    def on_before_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] * 2, batch[1]]

    def on_after_batch_transfer(self, batch: list[Tensor], dataloader_idx: int) -> list[Tensor]:
        return [batch[0] + torch.randn_like(batch[0]), batch[1]]


class WarmsUp(Plain):
    """The warm-up of Lightning's documentation."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * min(batch_idx + 1, 3)
        optimizer.step(closure=optimizer_closure)


class SkipsSteps(Plain):
    """Steps the optimiser on every other batch only."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer.step(closure=optimizer_closure)
        else:
            optimizer_closure()


class ClipsItself(Plain):
    def configure_gradient_clipping(self, optimizer: Any, gradient_clip_val: Any, gradient_clip_algorithm: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.1, gradient_clip_algorithm="norm")


class StepsItsScheduler(Plain):
    scheduler_steps = 0

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        decay = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": decay, "interval": "step"}}

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        type(self).scheduler_steps += 1  # a visit forgets what it counts in the module
        scheduler.step()


class ZeroesItself(Plain):
    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        (2 * loss).backward()


class Skips(Plain):
    """Returns None for some batches, which Lightning's documentation calls skipping them."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        return None if batch_idx == 1 else self.loss(batch)


MODULES = [
    ReturnsDict,
    TakesOnlyBatch,
    TakesAnything,
    StopsEarly,
    ChangesBatches,
    WarmsUp,
    SkipsSteps,
    ClipsItself,
    StepsItsScheduler,
    ZeroesItself,
    Skips,
]
returning_none = pytest.mark.filterwarnings("ignore:.*`training_step` returned `None`")
# Lightning says which of two implementations it takes, although the datamodule has none
two_hooks = pytest.mark.filterwarnings("ignore:You have overridden `on_.*_batch_transfer` in `LightningModule`")


@two_hooks
@returning_none
@pytest.mark.parametrize("kind", MODULES)
def test_a_federation_trains_it(kind: type[pl.LightningModule]) -> None:
    data, visits, module = classification(4), Visits(), kind()
    before = objective(module, data)
    server = FederatedServer(FedADMM(eta=1.0), clients_per_round=3, local_epochs=4, seed=SEED)
    trainer = quiet_trainer(server, 5, callbacks=[visits])
    trainer.fit(module, datamodule=data)
    assert objective(module, data) < 0.9 * before
    assert all(loss == loss for loss in visits.losses)


def objective(module: Plain, data: FederatedDataModule) -> float:
    """Mean loss over all samples, in evaluation mode."""
    x, y = (torch.cat([data.client_dataset(cid).tensors[j] for cid in data.client_ids]) for j in (0, 1))
    module.eval()
    loss = module.loss([x, y]).item()
    module.train()
    return loss


def test_an_overridden_scheduler_step_is_called_once_per_local_step() -> None:
    server = FederatedServer(FedAvg(), clients_per_round=2, local_steps=5, seed=SEED)
    StepsItsScheduler.scheduler_steps = 0
    quiet_trainer(server, 3).fit(StepsItsScheduler(), datamodule=classification(4))
    assert StepsItsScheduler.scheduler_steps == 3 * 2 * 5


def test_a_visit_that_is_cut_short_reports_the_steps_it_took() -> None:
    class Steps(Visits):
        def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
            assert reply.steps == 2

    quiet_trainer(FederatedServer(FedAvg()), 1, callbacks=[Steps()]).fit(StopsEarly(), datamodule=classification(4))


@returning_none
def test_a_batch_without_a_loss_makes_no_step() -> None:
    """Lightning skips it. The penalty alone is no reason to step: the loss form would not either."""

    class NeverTrains(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
            return None

    class Drift(Visits):
        def on_before_zero_grad(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
            if not hasattr(self, "moved"):
                self.moved = True
                with torch.no_grad():  # as if the client had been elsewhere: now its penalty has a gradient
                    module.net[0].weight.add_(1.0)

    drift = Drift()
    quiet_trainer(FederatedServer(FedADMM(eta=1.0), local_steps=3, evaluate_every=0), 1, callbacks=[drift]).fit(
        module := NeverTrains(), datamodule=alone(classification(1), "c0")
    )
    first = NeverTrains().net[0].weight.detach()
    assert torch.equal(drift.ends[0][2]["net.0.weight"], first + 1.0)
    assert x_of(module).isfinite().all()
