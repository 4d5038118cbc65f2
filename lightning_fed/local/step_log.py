"""What the steps of a stack of clients log."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import pytorch_lightning as pl
from torch import Tensor
from torchmetrics import Metric

from lightning_fed.local.functional import Outline
from lightning_fed.local.plan import Block


class StepLog:
    """What the steps of a stack logged, handed to Lightning once per stack as sample-weighted means."""

    def __init__(self) -> None:
        self._sums: dict[str, float] = defaultdict(float)
        self._samples = 0
        self._updates: list[tuple[Metric, list[Tensor]]] = []
        self._outline: Outline | None = None

    def note(self, block: Block, outline: Outline, values: Sequence[Tensor]) -> None:
        """Sum up the steps of a block, which logged values by sample (T, m, B, ...)."""
        self._outline, inside = outline, block.weights > 0
        noted = iter([value[inside] for value in values])
        self._samples += int(inside.sum())
        for name in outline.computed:
            self._sums[name] += float(next(noted).double().sum())
        for metric, count in outline.updates:
            self._updates.append((metric, [next(noted).flatten(0, 1) for _ in range(count)]))

    def replay(self, trainer: pl.Trainer) -> None:
        module, outline = trainer.lightning_module, self._outline
        module._current_fx_name = "training_step"
        for metric, args in self._updates:
            metric.update(*(arg.clone() for arg in args))  # made in inference mode, where metrics do not live
        for name, (known, kwargs) in outline.logged.items() if outline else ():
            value = self._sums[name] / self._samples if known is None else known
            module.log(name, value, batch_size=self._samples, **kwargs)
