"""Plan the step sizes of the visits of a round."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from itertools import accumulate

from lightning_fed.core.memory import ClientId
from lightning_fed.local.client_loop import ClientLoop
from lightning_fed.local.server_snapshot import Workspace
from lightning_fed.trainer.eligibility import why_not_plain


class StepSizePlan:
    """Computes the sum of the step sizes of a visit, as the weighted mean over all clients of a federation.

    Algorithms that derive their dual step from this sum need one number per round, for every cohort.

    Args:
        batches: number of batches of a visit, by client.
        weights: weights of the clients.
    """

    def __init__(self, batches: Mapping[ClientId, int], weights: Mapping[ClientId, float]) -> None:
        self.most = max(batches.values())
        self._weights: Counter[int] = Counter()  # total weight of the clients by number of batches
        for cid, count in batches.items():
            self._weights[count] += weights[cid]  # type: ignore[assignment]

    def lr_sum(self, loop: ClientLoop, workspace: Workspace) -> float:
        """The planned sum for a visit that begins now; NaN if steps are not plain gradient steps."""
        trainer = loop.trainer
        optimizers, module = trainer.optimizers, trainer.lightning_module
        plain = len(optimizers) == 1 and why_not_plain(optimizers[0], decay=True) is None
        if not plain or not module.automatic_optimization:
            return float("nan")
        every, rate = trainer.accumulate_grad_batches, optimizers[0].param_groups[0]
        steps = {count: -(-count // every) for count in self._weights}
        if any(config.interval == "step" for config in trainer.lr_scheduler_configs):
            sums = [0.0, *accumulate(float(rate["lr"]) for _ in loop.scheduled(0))]
            workspace.reset()
        else:
            sums = [float(rate["lr"]) * step for step in range(max(steps.values()) + 1)]
        if len(steps) == 1:
            return sums[steps[self.most]]  # exact, while a weighted mean would round
        return sum(w * sums[steps[count]] for count, w in self._weights.items()) / sum(self._weights.values())
