"""Models and data for tests of `lightning-fed tune`, which imports them by name."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lightning_fed.datamodules import Synthetic
from lightning_fed.models import MLP


class OneCycle(MLP):
    """Its momentum and step size depend on the number of all steps of the run, which `max_epochs` decides."""

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.lr, momentum=0.9)
        steps = int(self.trainer.estimated_stepping_batches)
        cycle = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=self.lr, total_steps=steps)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cycle, "interval": "step"}}


class Overflowing(MLP):
    """Its loss in evaluation is infinite from the second round on; training stays finite."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if self.training or self.current_epoch < 1 else loss + torch.inf


class HeldOut(Synthetic):
    """The data that the original holds out for testing are validation data."""

    def setup(self, stage: str | None = None) -> None:
        super().setup(stage)
        if "test" in self.splits:
            self.splits["val"] = self.splits.pop("test")
