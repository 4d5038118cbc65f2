"""Wherever a module or its optimiser keeps state, a reply does not depend on earlier visits, nor on evaluation."""

from __future__ import annotations

import copy
import io
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import classification, quiet_trainer, x_of
from pytorch_lightning.callbacks import ModelPruning
from torch import Tensor, nn
from torch.optim.lr_scheduler import ExponentialLR, ReduceLROnPlateau
from torch.utils.data import Dataset, Subset, TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedAvg
from lightning_fed.engines import ClientError

IGNORED = pytest.mark.filterwarnings("ignore:Training changes the attribute")


class Base(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Linear(6, 3)
        self.build()

    def build(self) -> None:
        pass

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.3)


class Lookahead(torch.optim.SGD):
    """Slow weights in an attribute, as it is commonly written."""

    def __init__(self, params: Any, lr: float) -> None:
        super().__init__(params, lr=lr)
        self.slow: dict[Tensor, Tensor] = {}
        self.k = 0

    def step(self, closure: Any = None) -> Any:
        loss = super().step(closure)
        self.k += 1
        for p in (p for group in self.param_groups for p in group["params"]):
            slow = self.slow.setdefault(p, p.data.clone())
            if self.k % 2 == 0:
                slow.lerp_(p.data, 0.5)
                p.data.copy_(slow)
        return loss


class SlowWeights(Base):
    def configure_optimizers(self) -> Any:
        return Lookahead(self.parameters(), 0.3)


class OnParameters(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self.loss(batch)
        for p in self.parameters():
            if hasattr(p, "previous"):
                loss = loss + (p - p.previous).pow(2).sum()
            p.previous = p.detach().clone()
        return loss


class InAHook(Base):
    def build(self) -> None:
        calls = [0]

        def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
            calls[0] += 1
            return output * (1 + 0.1 * calls[0])

        self.net.register_forward_hook(hook)


class Memory(Dataset[Any]):
    def __init__(self) -> None:
        self.samples: list[Any] = []

    def __len__(self) -> int:
        return len(self.samples)

    def __getitem__(self, i: int) -> Any:
        return self.samples[i]


class InADataset(Base):
    """Cuts its memory, so that it is not a list of entries to be joined."""

    def build(self) -> None:
        self.memory = Memory()
        self.memory.samples.append(None)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.memory.samples[0] = 1 if self.memory.samples[0] is None else self.memory.samples[0] + 1
        return self.loss(batch) * (1 + 0.1 * self.memory.samples[0])


class OnTheClass(Base):
    counts = {"steps": 0}  # noqa: RUF012  # what users do

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.counts["steps"] += 1
        return self.loss(batch) / self.counts["steps"]


class InADefault(Base):
    def build(self) -> None:
        def scaled(loss: Tensor, seen: list[int] = [0]) -> Tensor:  # noqa: B006  # what users do
            seen[0] += 1
            return loss / seen[0]

        self.scaled = scaled

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.scaled(self.loss(batch))


class Meter(nn.Module):
    n = 0

    def forward(self, loss: Tensor) -> Tensor:
        self.n += 1
        return loss / self.n


class LazyPart(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "meter"):
            self.meter = Meter()
        return self.meter(self.loss(batch))


class LazyTeacher(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "teacher"):
            self.teacher = copy.deepcopy(self.net).requires_grad_(False)
        return self.loss(batch) + (self(batch[0]) - self.teacher(batch[0])).pow(2).mean()


class LateBuffer(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if not hasattr(self, "mean"):
            self.register_buffer("mean", torch.zeros(3))
        self.mean.lerp_(self(batch[0]).mean(0).detach(), 0.1)
        return self.loss(batch) + (self(batch[0]) - self.mean).pow(2).mean()


class LateHook(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 1:
            self.net.register_forward_hook(lambda module, args, output: 1.5 * output)
        return self.loss(batch)


KINDS = [
    SlowWeights,
    OnParameters,
    InAHook,
    InADataset,
    OnTheClass,
    InADefault,
    LazyPart,
    LazyTeacher,
    LateBuffer,
    LateHook,
]


def trained(kind: type[Base], rounds: int = 2, **settings: Any) -> Tensor:
    options = {"local_steps": 3, "seed": 0, "evaluate_every": 0, "figure": False, "engine": "sequential", **settings}
    module = kind()
    quiet_trainer(FederatedServer(FedAvg(), **options), rounds).fit(module, datamodule=classification(3))
    return x_of(module)


@IGNORED
@pytest.mark.parametrize("kind", KINDS)
def test_what_a_visit_keeps_anywhere_reaches_neither_other_clients_nor_is_reached_by_evaluation(kind: Any) -> None:
    expected = trained(kind)
    assert torch.equal(trained(kind, workers=2), expected)
    assert torch.equal(trained(kind, evaluate_every=1), expected)


def test_an_object_written_in_c_is_named_even_if_it_has_attributes() -> None:
    class Writes(Base):
        def build(self) -> None:
            self.text = io.StringIO()

    with pytest.warns(UserWarning, match="attribute text of Writes cannot be copied"):
        trained(Writes)


class ByLambda(Base):
    stackable = True

    def build(self) -> None:
        self.apply_net = lambda x: self.net(x)

    def forward(self, x: Tensor) -> Tensor:
        return self.apply_net(x)


def test_a_function_that_refers_to_the_module_is_not_stacked() -> None:
    assert torch.equal(trained(ByLambda, engine="auto"), trained(ByLambda))
    with pytest.raises(ValueError, match=r"ByLambda\.apply_net is a function that refers to the module"):
        trained(ByLambda, engine="vectorized")


class OtherLoss(Base):
    stackable = True

    def on_train_epoch_start(self) -> None:
        self.criterion = nn.CrossEntropyLoss(label_smoothing=0.2 * self.current_epoch)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.criterion(self(batch[0]), batch[1])


class OtherWeights(Base):
    stackable = True

    def on_train_epoch_end(self) -> None:
        if self.current_epoch == 0:
            self.register_buffer("weights", torch.tensor([1.0, 2.0, 3.0]))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        weights = getattr(self, "weights", None)
        return nn.functional.cross_entropy(self(batch[0]), batch[1], weight=weights, reduction="sum") / 4


@pytest.mark.parametrize("kind", [OtherLoss, OtherWeights])
def test_a_stack_sees_parts_and_buffers_that_are_new_in_a_round(kind: Any) -> None:
    expected, first = trained(kind, 3), trained(kind, 1)
    assert torch.allclose(trained(kind, 3, engine="vectorized"), expected, atol=1e-6)
    assert not torch.allclose(expected, first, atol=1e-3)


class Decays(Base):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        return [optimizer], [{"scheduler": ExponentialLR(optimizer, 0.9), "interval": "step"}]


def test_schedules_advance_by_t_whoever_takes_part() -> None:
    """Clients of 3 and 5 batches, accumulated in pairs: T is 3 steps, also in rounds of the smaller client alone."""
    g = torch.Generator().manual_seed(0)
    sets = [TensorDataset(torch.randn(n, 6, generator=g), torch.randint(3, (n,), generator=g)) for n in (9, 15)]
    data, server = FederatedDataModule(sets, batch_size=3), FederatedServer(FedAvg(), clients_per_round=1, seed=1)
    trainer = quiet_trainer(server, 4, accumulate_grad_batches=2)
    trainer.fit(Decays(), datamodule=data)
    assert trainer.lr_scheduler_configs[0].scheduler.last_epoch == 4 * 3 == server.local_time


class Plateau(Base):
    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=1.0)
        scheduler = {"scheduler": ReduceLROnPlateau(optimizer), "interval": "step", "monitor": "loss"}
        return {"optimizer": optimizer, "lr_scheduler": scheduler}


def test_a_plateau_by_step_is_refused() -> None:
    with pytest.raises(ValueError, match="ReduceLROnPlateau with interval 'step'"):
        trained(Plateau)


def test_pruning_by_callback_is_refused() -> None:
    trainer = quiet_trainer(FederatedServer(FedAvg()), 1, callbacks=[ModelPruning("l1_unstructured", amount=0.3)])
    with pytest.raises(ValueError, match="ModelPruning"):
        trainer.fit(Base(), datamodule=classification(2))


class AddsAGroup(Base):
    def build(self) -> None:
        self.extra = nn.Linear(1, 1)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if batch_idx == 1:
            self.optimizers().add_param_group({"params": self.extra.parameters()})

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.net.parameters(), lr=0.3)


def test_a_group_that_is_added_in_a_visit_is_refused_by_name() -> None:
    with pytest.raises(ClientError, match=r"client 'c0'.*added a group of parameters to SGD"):
        trained(AddsAGroup)


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@pytest.mark.parametrize("make", [lambda: torch.empty(2, device="meta"), lambda: torch.nested.nested_tensor([[1.0]])])
def test_tensors_without_numbers_are_named(make: Any) -> None:
    class Holds(Base):
        def build(self) -> None:
            self.odd = make()

    with pytest.warns(UserWarning, match="attribute odd of Holds cannot be copied"):
        trained(Holds)


class Stacks(Base):
    stackable = True


def test_a_subset_may_count_from_the_end() -> None:
    whole = classification(1).splits["train"]["c0"]

    def run(engine: str) -> Tensor:
        data = FederatedDataModule([Subset(whole, [-1, -2, 0, 1]), Subset(whole, [3, -4, 5, 2])], batch_size=2)
        server = FederatedServer(FedAvg(), local_steps=3, engine=engine, evaluate_every=0)
        quiet_trainer(server, 2).fit(module := Stacks(), datamodule=data)
        return x_of(module)

    assert torch.allclose(run("vectorized"), run("sequential"), atol=1e-6)


class Augmented(Dataset[Any]):
    """Draws from a generator of its own."""

    def __init__(self, seed: int) -> None:
        g = torch.Generator().manual_seed(seed)
        self.x, self.y = torch.randn(6, 6, generator=g), torch.randint(3, (6,), generator=g)
        self.noise = np.random.default_rng(seed)

    def __len__(self) -> int:
        return 6

    def __getitem__(self, i: int) -> Any:
        return self.x[i] + float(self.noise.normal()), self.y[i]


def test_data_that_draw_by_themselves_are_named_and_evaluation_leaves_their_draws_alone() -> None:
    def run(evaluate_every: int) -> Tensor:
        data = FederatedDataModule([Augmented(i) for i in range(3)], batch_size=3)
        server = FederatedServer(FedAvg(), evaluate_every=evaluate_every)
        with pytest.warns(UserWarning, match="client 0 draw from a random generator of their own") as caught:
            quiet_trainer(server, 3).fit(module := Base(), datamodule=data)
        assert sum("random generator" in str(warning.message) for warning in caught) == 1
        return x_of(module)

    assert torch.equal(run(1), run(0))
