"""Modules that do unusual but allowed things: build layers late, keep state in buffers, differentiate in the step."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import classification, quiet_trainer
from helpers.reuse import SEED, Plain, Visits, alone, assert_same, plainly_trained
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.optim import lr_scheduler

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg


def test_layers_may_be_built_in_setup() -> None:
    """The documentation of LightningModule.setup builds the model there, once the data are known."""

    class BuiltLate(Plain):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)

        def setup(self, stage: str) -> None:
            torch.manual_seed(0)
            self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, self.trainer.datamodule.num_classes))

    data, visits = classification(4), Visits()
    data.num_classes = 3
    quiet_trainer(FederatedServer(FedAvg(), seed=SEED), 4, callbacks=[visits]).fit(BuiltLate(), datamodule=data)
    assert visits.losses[-1] < visits.losses[0]


def test_layers_may_be_built_in_configure_model() -> None:
    class BuiltLater(Plain):
        def __init__(self) -> None:
            pl.LightningModule.__init__(self)
            self.net = None

        def configure_model(self) -> None:
            if self.net is None:
                torch.manual_seed(0)
                self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3))

    visits = Visits()
    server = FederatedServer(FedAvg(), seed=SEED)
    quiet_trainer(server, 4, callbacks=[visits]).fit(BuiltLater(), datamodule=classification(4))
    assert visits.losses[-1] < visits.losses[0]


@pytest.mark.parametrize("policy", ["server", "local"])
def test_what_the_server_does_to_its_own_buffers_between_rounds_lasts(policy: Any) -> None:
    class Counts(Plain):
        def __init__(self) -> None:
            super().__init__(norm=True)
            self.register_buffer("epochs_seen", torch.zeros((), dtype=torch.long))

        def on_train_epoch_end(self) -> None:
            self.epochs_seen += 1

    module = Counts()
    server = FederatedServer(FedAvg(), buffers=policy, local_steps=2)
    quiet_trainer(server, 3).fit(module, datamodule=classification(4))
    assert int(module.epochs_seen) == 3


def test_a_step_may_differentiate_inside_itself() -> None:
    """As in physics-informed networks and gradient penalties: the loss holds a derivative of the network."""

    class Smooth(Plain):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            x = batch[0].clone().requires_grad_()
            (slope,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
            return self.loss(batch) + 0.01 * slope.square().mean()

    visits, server = Visits(), FederatedServer(FedAvg(), seed=SEED)
    quiet_trainer(server, 4, callbacks=[visits]).fit(Smooth(), datamodule=classification())
    assert visits.losses[-1] < visits.losses[0]


@pytest.mark.parametrize("policy", ["average", "server", "local"])
def test_evaluating_on_clients_does_not_change_what_is_trained(policy: Any) -> None:
    """A queue or a running scale in a buffer is moved by training_step, which evaluation calls too."""

    class Scaled(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("scale", torch.ones(()))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            loss = self.loss(batch)
            self.scale.mul_(0.9).add_(0.1 * loss.detach())
            return loss / self.scale

    def trained(evaluate_every: int) -> dict[str, Tensor]:
        server = FederatedServer(FedAvg(), seed=SEED, evaluate_every=evaluate_every, buffers=policy)
        quiet_trainer(server, 3).fit(module := Scaled(), datamodule=classification())
        return module.state_dict()

    assert_same(trained(evaluate_every=1), trained(evaluate_every=0))


def test_a_buffer_that_a_client_creates_does_not_reach_the_next_client() -> None:
    """Statistics that are None until the first batch, as in many normalisers."""
    created: list[int] = []

    class Normalised(Plain):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mean", None)

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            if self.mean is None:
                self.mean = batch[0].mean(0)
                created.append(batch_idx)
            return self.loss([batch[0] - self.mean, batch[1]])

    server = FederatedServer(FedADMM(), seed=SEED, evaluate_every=0, buffers="local")
    quiet_trainer(server, 1).fit(Normalised(), datamodule=classification(3))
    assert created == [0, 0, 0]


SCHEDULERS: dict[str, Any] = {
    "one cycle": lambda o: lr_scheduler.OneCycleLR(o, max_lr=0.3, total_steps=20),
    "cyclic": lambda o: lr_scheduler.CyclicLR(o, base_lr=0.1, max_lr=0.4, step_size_up=2),
    "warm-up then cosine": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.LinearLR(o, 0.1, total_iters=2), lr_scheduler.CosineAnnealingLR(o, 10)], milestones=[2]
    ),
    "lambda": lambda o: lr_scheduler.LambdaLR(o, lambda step: 1 / (1 + step)),
    "multi step": lambda o: lr_scheduler.MultiStepLR(o, [1, 3], gamma=0.5),
    "warm restarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, 2),
}


class Scheduled(Plain):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=0.2, momentum=0.5)
        scheduler = SCHEDULERS[self.name](optimizer)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step", "frequency": 1}}


@pytest.mark.parametrize("name", SCHEDULERS)
def test_schedulers_by_step_begin_as_in_a_plain_trainer(name: str) -> None:
    """Every visit of a first round is that of a plain trainer with a new optimiser and a new scheduler."""
    data, visits = classification(3), Visits()
    server = FederatedServer(FedAvg(), seed=SEED, evaluate_every=0)
    trainer = quiet_trainer(server, 1, callbacks=[visits])
    trainer.fit(Scheduled(name), datamodule=data)
    for _, cid, end in visits.ends:
        assert_same(end, plainly_trained(Scheduled(name), alone(data, cid), cid, rounds=1))
    trainer.fit_loop.max_epochs = 3
    trainer.fit(trainer.lightning_module, datamodule=data)
    assert trainer.current_epoch == 3


@pytest.mark.filterwarnings("ignore:A `OneCycleLR` scheduler")
@pytest.mark.parametrize("interval", ["epoch", "step"])
def test_a_cycle_over_estimated_stepping_batches_is_a_cycle_over_all_local_steps(interval: str) -> None:
    """As docs/rounds.md says: the estimate counts local steps, so by round such a cycle has only begun at the end."""

    class OneCycle(Plain):
        def configure_optimizers(self) -> Any:
            optimizer = super().configure_optimizers()
            cycle = lr_scheduler.OneCycleLR(optimizer, 0.3, total_steps=self.trainer.estimated_stepping_batches)
            return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": interval}}

    server = FederatedServer(FedAvg(), local_steps=6, evaluate_every=0)
    trainer = quiet_trainer(server, 3)
    trainer.fit(OneCycle(), datamodule=classification())
    cycle = trainer.lr_scheduler_configs[0].scheduler
    assert (cycle.total_steps, cycle.last_epoch) == (3 * 6, 3 * 6 if interval == "step" else 3)


def test_accumulation_may_change_by_round() -> None:
    class Steps(Visits):
        def __init__(self) -> None:
            super().__init__()
            self.counts: dict[int, int] = {}

        def on_before_optimizer_step(self, trainer: pl.Trainer, module: pl.LightningModule, optimizer: Any) -> None:
            self.counts[trainer.current_epoch] = self.counts.get(trainer.current_epoch, 0) + 1

    steps = Steps()
    callbacks = [GradientAccumulationScheduler({0: 1, 1: 3}), steps]
    quiet_trainer(FederatedServer(FedADMM()), 3, callbacks=callbacks).fit(Plain(), datamodule=classification(2))
    assert steps.counts == {0: 3 + 3, 1: 1 + 1, 2: 1 + 1}
