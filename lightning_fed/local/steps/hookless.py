"""Local steps without Lightning's hooks, where no module or callback overrides them.

Computes the same numbers as Lightning's optimisation loop (a test compares them bitwise) in about half the time on
small models; ``trainer/eligibility.py`` decides whether a run allows it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lightning_fed.lightning import enter_hook, pl
from lightning_fed.local.augmented_gradient import AugmentedGradient


class LeanStep:
    """One local step: ``training_step``, backward, the augmented gradient, clipping, ``optimizer.step``."""

    def __init__(self, trainer: pl.Trainer, augmented: AugmentedGradient, wants_index: bool) -> None:
        self.trainer, self.augmented, self.wants_index = trainer, augmented, wants_index
        self.module, self.optimizer = trainer.lightning_module, trainer.optimizers[0]

    def __call__(self, batch: Any, batch_idx: int) -> dict[str, Any]:
        module, precision = self.module, self.trainer.precision_plugin
        enter_hook(module, "training_step")
        self.augmented.before_batch(batch, batch_idx)
        with precision.train_step_context():
            output: Any = module.training_step(*((batch, batch_idx) if self.wants_index else (batch,)))
        loss = output["loss"] if isinstance(output, Mapping) else output
        self.optimizer.zero_grad()  # after the forward pass, as in Lightning, because a step may read old gradients
        self._move(loss)
        return {} if loss is None else {"loss": loss.detach()}

    def _move(self, loss: Any) -> None:
        """Update the model from the loss of a batch."""
        if isinstance(loss, Tensor):
            loss.backward()  # type: ignore[no-untyped-call]
        self.augmented.add_to(self.optimizer)
        if self.trainer.gradient_clip_val:
            algorithm = self.trainer.gradient_clip_algorithm or "norm"
            self.module.clip_gradients(self.optimizer, self.trainer.gradient_clip_val, algorithm)
        self.optimizer.step()
        self.augmented.after_step(self.optimizer)
