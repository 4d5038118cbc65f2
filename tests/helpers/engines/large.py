"""Large layers with habits of their own, whose steps could be taken in place before the habit shows."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.checkpoint import checkpoint

from helpers.engines.base import Odd, Row


class Wide(Odd):
    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.first, self.wide, self.last = nn.Linear(6, 520), nn.Linear(520, 520), nn.Linear(520, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.wide(torch.tanh(self.first(x)))))


class Pruned(Wide):
    def build(self) -> None:
        super().build()
        prune.l1_unstructured(self.wide, "weight", 0.3)


class Replaced(Wide):
    def build(self) -> None:
        super().build()
        self.wide.forward = lambda x: 2 * nn.functional.linear(x, self.wide.weight, self.wide.bias)


class Halves(Wide):
    def configure_optimizers(self) -> Any:
        self.wide.weight.register_post_accumulate_grad_hook(lambda p: setattr(p, "grad", p.grad / 2))
        return super().configure_optimizers()


class LaterAdversarial(Wide):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        if self.current_epoch:
            x = x.clone().requires_grad_()
            (slope,) = torch.autograd.grad(super().loss(x, y), x)
            x = (x + 0.1 * slope.sign()).detach()
        return super().loss(x, y)


class LaterPenalised(Wide):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        x = x.clone().requires_grad_()
        loss = super().loss(x, y)
        if self.current_epoch:
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            loss = loss + slope.square().sum()
        return loss


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


class HookedLater(pl.Callback):
    """A hook on the large weight comes in the second round."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        if trainer.current_epoch == 1:
            pl_module.wide.weight.register_hook(lambda slope: slope * 0)


HABITS = [Pruned, Replaced, Halves, LaterAdversarial, LaterPenalised]
LOOKING = [Apart, Hinge, LaterL2, Freezes, LastOnly, Checkpointed, Detached, Hooked]
LOOKING += [Implicit, WeightGradientInside, InPlace, Transformed]

LARGE = [
    *(Row(f"large: {kind.__name__}", kind, ways=["lean"]) for kind in HABITS),
    *(Row(f"large: {kind.__name__}", kind, options={"local_steps": 8}, ways=["lean"]) for kind in LOOKING),
    Row(
        "large: Unregistered",
        Unregistered,
        options={"local_steps": 8},
        ways=["lean"],
        warns={"all": "Training changes the attribute extra"},  # a parameter in a plain list
    ),
    Row(
        "large: CheckpointedAgain",
        CheckpointedAgain,
        options={"local_steps": 8},
        ways=["lean"],
        warns={"all": "None of the inputs have requires_grad"},
    ),
    Row("large: hooked later", Wide, callbacks=lambda: [HookedLater()], ways=["lean"]),
]
