"""A declaration counts in or below the class that defines what it is about."""

from __future__ import annotations

from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from torch import Tensor, nn

from lightning_fed.models import MLP, FemnistCNN
from lightning_fed.trainer.declarations import declares


class Plain(pl.LightningModule):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)

    def helper(self, x: Tensor) -> Tensor:
        return self(x).sum()

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.helper(batch[0])

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Declared(Plain):
    stackable = True


class Own(Plain):
    stackable = True

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.helper(batch[0]) * 2


class OtherOptimizer(Declared):
    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters())

    def on_train_epoch_end(self) -> None:
        pass

    def __init__(self, more: int = 0) -> None:
        super().__init__()


class OtherForward(Declared):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x + torch.randn_like(x))


class OtherStep(Declared):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) * torch.rand(())


class OtherHelper(Declared):
    def helper(self, x: Tensor) -> Tensor:
        return super().helper(x) * torch.rand(())


class DeclaredAnew(OtherForward):
    stackable = True


class Withdrawn(Declared):
    stackable = False


class Mixin:
    def forward(self, x: Tensor) -> Tensor:
        return x


class Mixed(Mixin, Declared):
    pass


class ByItsSettings(Plain):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.dropout = dropout

    @property
    def stackable(self) -> bool:
        return self.dropout == 0


class Base(pl.LightningModule):
    stackable = True


class DefinesTheStepFirst(Base):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return torch.rand(())


@pytest.mark.parametrize(
    ("module", "expected"),
    [
        (Plain(), False),
        (Declared(), True),
        (Own(), True),
        (OtherOptimizer(), True),
        (OtherForward(), False),
        (OtherStep(), False),
        (OtherHelper(), False),
        (DeclaredAnew(), True),
        (Withdrawn(), False),
        (Mixed(), False),
        (ByItsSettings(0.0), True),
        (ByItsSettings(0.5), False),
        (DefinesTheStepFirst(), False),
        (MLP(), True),
        (FemnistCNN(), True),
    ],
    ids=lambda value: type(value).__name__,
)
def test_who_declares_what(module: pl.LightningModule, expected: bool) -> None:
    assert declares(module, "stackable", "training_step") is expected


def test_a_method_replaced_on_the_object_ends_the_declaration() -> None:
    module = Declared()
    vars(module)["forward"] = lambda x: x
    assert not declares(module, "stackable", "training_step")


def test_a_declaration_is_about_the_steps_it_is_asked_for() -> None:
    class OtherValidation(MLP):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("val_loss", torch.rand(()))

    module = OtherValidation()
    assert declares(module, "loss_is_mean", "training_step")
    assert not declares(module, "loss_is_mean", "validation_step")
