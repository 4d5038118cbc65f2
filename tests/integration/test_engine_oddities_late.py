"""What shows late, or elsewhere: losses that are means at first, weights looked at later, generators, closures."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from modules import Net, classification
from odd_modules import Odd, assert_same, data, fit
from pytorch_lightning.plugins import Precision
from test_engine_oddities_alone import Listener, Wide
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule
from lightning_fed.callbacks import TheoryMeter


class Flood(Odd):
    """A mean over samples as long as all of them are lost by more than 0.5."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (super().loss(x, y) - 0.5).abs() + 0.5

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.5)


class Weighs(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y, weight=x.new_tensor([1.0, 1.0, 8.0]))


def rare(seed: int = 2) -> FederatedDataModule:
    """One label in twenty is a 2, and none of those in the first batches."""
    draw, clients = torch.Generator().manual_seed(seed), {}
    for i in range(6):
        x = torch.randn(40, 6, generator=draw, dtype=torch.float64)
        y = torch.randint(0, 2, (40,), generator=draw)
        y[torch.rand(40, generator=draw) < 0.05] = 2
        clients[f"c{i}"] = TensorDataset(x, y)
    return FederatedDataModule(clients, batch_size=4)


@pytest.mark.parametrize("compile_", [False, True], ids=["recorded", "in C"])
@pytest.mark.parametrize(("kind", "own"), [(Flood, data), (Weighs, rare)])
def test_a_loss_that_is_a_mean_only_at_first_is_stacked_right(kind: type[Odd], own: Any, compile_: bool) -> None:
    expected = fit(kind, data=own(), local_steps=40)
    assert_same(expected, fit(kind, data=own(), local_steps=40, engine="vectorized", compile=compile_))


class Apart(Wide):
    """Two groups, whose learning rates part within a visit."""

    def configure_optimizers(self) -> Any:
        groups = [{"params": self.last.parameters()}, {"params": [*self.first.parameters(), *self.wide.parameters()]}]
        optimizer = torch.optim.SGD([{"params": list(group["params"])} for group in groups], lr=0.05)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, [lambda step: 1.0, lambda step: 0.5**step])
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}


class Hinge(Wide):
    """A penalty that sleeps at first, and looks at the weight before the forward pass."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return torch.relu(self.wide.weight.norm() - 13.2) + super().loss(x, y)


class LaterL2(Wide):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return (1e-3 * self.wide.weight.square().sum() if self.current_epoch else 0.0) + super().loss(x, y)


class Freezes(Wide):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.wide.weight.requires_grad_(not self.current_epoch)
        return super().loss(x, y)


class LastOnly(Wide):
    """Has a large weight with a gradient that its optimiser does not train."""

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.last.parameters(), lr=0.05)


class Unregistered(Wide):
    def build(self) -> None:
        super().build()
        self.extra = [nn.Parameter(torch.ones(3, dtype=torch.float64))]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.extra[0]

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD([*self.parameters(), *self.extra], lr=0.05)


class Checkpointed(Wide):
    """Runs its large layer again in the backward pass, in which weights must not have moved."""

    reentrant = False

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        return self.last(torch.tanh(checkpoint(self.wide, hidden, use_reentrant=self.reentrant)))


class CheckpointedAgain(Checkpointed):
    reentrant = True


class Detached(Wide):
    """Its backward pass needs the weight once more, by a use that has no gradient."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        again = nn.functional.linear(hidden, self.wide.weight.detach())
        return self.last(torch.tanh(self.wide(hidden) + again))


class Hooked(Wide):
    """A hook on an activation looks at the weight in the middle of the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        hidden = torch.tanh(self.first(x))
        if hidden.requires_grad:
            hidden.register_hook(lambda slope: slope * (1 + self.wide.weight.detach().norm() / 100))
        return self.last(torch.tanh(self.wide(hidden)))


class Implicit(Wide):
    """Solves for the gradient of a fixed point by passes of its own inside the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        inputs = self.first(x)
        point = torch.zeros_like(inputs)
        with torch.no_grad():
            for _ in range(8):
                point = torch.tanh(0.1 * self.wide(point) + inputs)
        point = torch.tanh(0.1 * self.wide(point) + inputs)
        if point.requires_grad:
            start = point.detach().requires_grad_()
            image = torch.tanh(0.1 * self.wide(start) + inputs.detach())

            def solve(slope: Tensor) -> Tensor:
                found = slope
                for _ in range(8):
                    found = torch.autograd.grad(image, start, found, retain_graph=True)[0] + slope
                return found

            point.register_hook(solve)
        return self.last(point)


class WeightGradientInside(Wide):
    """Asks for the gradient of the large weight itself inside a step, and differentiates it once more."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        loss = super().loss(x, y)
        (slope,) = torch.autograd.grad(loss, self.wide.weight, create_graph=True)
        return loss + 0.1 * slope.square().sum()


class InPlace(Wide):
    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.relu_(self.wide(torch.relu_(self.first(x)))))


class Transformed(Wide):
    """Takes a derivative by torch.func inside a step."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        slope = torch.func.grad(lambda x: self(x).square().sum())(x)
        return super().loss(x, y) + 1e-3 * slope.square().mean()


LOOKING = [Apart, Hinge, LaterL2, Freezes, LastOnly, Unregistered, Checkpointed, CheckpointedAgain, Detached, Hooked]
LOOKING += [Implicit, WeightGradientInside, InPlace, Transformed]


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
@pytest.mark.filterwarnings("ignore:Training changes the attribute extra")  # a parameter in a plain list
@pytest.mark.parametrize("kind", LOOKING)
def test_large_layers_that_are_looked_at_later_give_the_same_numbers(kind: type[Wide]) -> None:
    assert_same(fit(kind, Listener(), local_steps=8), fit(kind, local_steps=8))


def test_a_hook_on_a_large_weight_that_comes_later_is_heard() -> None:
    class Later(pl.Callback):
        def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
            if trainer.current_epoch == 1:
                pl_module.wide.weight.register_hook(lambda slope: slope * 0)

    assert_same(fit(Wide, Listener(), Later()), fit(Wide, Later()))


class SAM(torch.optim.SGD):
    """Evaluates its closure twice."""

    def step(self, closure: Any) -> Any:
        with torch.enable_grad():
            loss = closure()
        params = [p for group in self.param_groups for p in group["params"] if p.grad is not None]
        ways = [0.05 * p.grad for p in params]
        with torch.no_grad():
            torch._foreach_add_(params, ways)
        with torch.enable_grad():
            closure()
        with torch.no_grad():
            torch._foreach_sub_(params, ways)
        super().step()
        return loss


class UsesSAM(Odd):
    def configure_optimizers(self) -> Any:
        return SAM(self.parameters(), lr=0.05)


class Threefold(Precision):
    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor * 3, *args, **kwargs)


def test_optimisers_and_precisions_of_the_users_own_go_through_lightning() -> None:
    assert_same(fit(UsesSAM, Listener()), fit(UsesSAM))
    own = {"plugins": [Threefold()]}
    assert_same(fit(Odd, Listener(), trainer=own), fit(Odd, trainer=own))
    assert not torch.allclose(fit(Odd, trainer=own)[0], fit(Odd)[0])


class Halved(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * torch.tensor(0.1)


def test_a_step_that_makes_tensors_makes_them_in_the_precision_of_the_run() -> None:
    options: dict[str, Any] = {"trainer": {"precision": "64-true"}, "local_steps": 20}
    expected = fit(Halved, data=classification(4), **options)
    assert expected[0].dtype == torch.float64
    found = fit(Halved, data=classification(4), engine="vectorized", **options)
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-14)


class Noisy(Odd):
    """Draws from a generator of its own."""

    def build(self) -> None:
        self.noise: Any = np.random.default_rng(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x + torch.as_tensor(self.noise.normal(size=x.shape)), y)


class NoisyTorch(Noisy):
    def build(self) -> None:
        self.noise = torch.Generator().manual_seed(0)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return Odd.loss(self, x + torch.randn(x.shape, generator=self.noise, dtype=x.dtype), y)


class CountsLabels(Odd):
    def build(self) -> None:
        self.noise = np.zeros(3)

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        self.noise += np.bincount(y.numpy(), minlength=3)
        return super().loss(x, y) * (1 + self.noise[0] / 100)


@pytest.mark.parametrize("kind", [Noisy, NoisyTorch, CountsLabels])
def test_what_a_module_draws_or_counts_by_itself_reaches_no_other_client(kind: type[Odd]) -> None:
    def dropped(**settings: Any) -> Any:
        with pytest.warns(UserWarning, match="Training changes the attribute noise"):
            return fit(kind, **settings)

    expected = dropped()
    assert_same(expected, dropped(workers=2))
    assert_same(expected, dropped(engine="auto"))


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    noise = np.random.default_rng(0)

    def __init__(self, plain: Dataset[Any]) -> None:
        self.plain: Any = plain

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.plain[i]
        return x + torch.as_tensor(self.noise.normal(size=x.shape)), y


@pytest.mark.filterwarnings("ignore:The data of client 'c0' draw from a random generator of their own")
def test_what_data_draw_by_themselves_passes_from_client_to_client() -> None:
    def own() -> FederatedDataModule:
        Augmented.noise = np.random.default_rng(0)
        clients = data().splits["train"].items()
        return FederatedDataModule({cid: Augmented(plain) for cid, plain in clients}, batch_size=4)

    expected = fit(Odd, data=own())
    with pytest.warns(UserWarning, match="a random generator of the data"):
        assert_same(expected, fit(Odd, data=own(), workers=2))


@pytest.mark.filterwarnings("ignore")  # of the meter, about the bounds
@pytest.mark.parametrize("options", [{}, {"local_tolerance": 0.05, "local_steps": None, "local_epochs": 2}])
def test_workers_tell_how_exact_answers_are(options: dict[str, Any]) -> None:
    expected = fit(Odd, TheoryMeter(every=1), **options)
    assert "theory/residual_max" in expected[1]
    assert_same(expected, fit(Odd, TheoryMeter(every=1), workers=2, **options))
