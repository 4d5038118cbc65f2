"""Results of evaluating a model on clients' data."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torchmetrics import Metric

from lightning_fed.core.direction import direction
from lightning_fed.core.memory import ClientId
from lightning_fed.evaluation.names import ACCURACY, LOSS, public_names, short_name


@dataclass
class Evaluation:
    """A model on one client's data: mean loss, accuracy (nan if the module reports none), number of samples.

    ``others`` has all other metrics by the names that they were logged with; nan where a metric has no value for this
    client. ``higher_is_better`` says of them what torchmetrics does.
    """

    loss: float = math.nan
    accuracy: float = math.nan
    examples: int = 0
    others: dict[str, float] = field(default_factory=dict)
    higher_is_better: dict[str, bool] = field(default_factory=dict)

    @classmethod
    def of(
        cls, returned: float | None, logged: Mapping[str, float], examples: int, higher_is_better: Mapping[str, bool]
    ) -> Evaluation:
        """Find loss and accuracy: the loss that the step ``returned``, or the first that it logged; the first "acc".

        A logged value that is called "loss" is not repeated beside the loss that the step returned.
        """
        of_loss = next((name for name in logged if _is_loss(name, returned is not None)), None)
        of_accuracy = next((name for name in logged if "acc" in name.lower()), None)
        loss = (math.nan if of_loss is None else logged[of_loss]) if returned is None else returned
        accuracy = math.nan if of_accuracy is None else logged[of_accuracy]
        others = {name: value for name, value in logged.items() if name not in (of_loss, of_accuracy)}
        return cls(loss, accuracy, examples, others, {n: up for n, up in higher_is_better.items() if n in others})


def _is_loss(name: str, returned: bool) -> bool:
    return short_name(name).lower() == LOSS if returned else LOSS in name.lower()


def stated_directions(logged: Mapping[str, Any]) -> dict[str, bool]:
    """What torchmetrics says of logged metrics: whether higher values are better."""
    stated = {name: value.higher_is_better for name, value in logged.items() if isinstance(value, Metric)}
    return {name: up for name, up in stated.items() if up is not None}


@dataclass(frozen=True)
class Spread:
    """A metric over clients: sample-weighted mean, standard deviation, worst decile, worst value and worst client.

    ``sd`` is the root of the mean squared distance of the clients' values from their mean, each client counted once;
    ``worst_decile`` is the mean of the worst tenth of the clients, rounded up. Both ``worst`` figures are nan, and
    ``client`` is None, where it is not known which side is the worse one.
    """

    mean: float = math.nan
    sd: float = math.nan
    worst_decile: float = math.nan
    worst: float = math.nan
    client: ClientId | None = None


@dataclass
class ClientEvaluations:
    """Evaluations by client of one split."""

    by_client: dict[ClientId, Evaluation] = field(default_factory=dict)

    @cached_property
    def logged_names(self) -> dict[str, str]:
        """The logged names of the other metrics by their public names, which are the same for all clients."""
        logged = {name: None for e in self.by_client.values() for name in e.others}
        return {public: name for name, public in public_names(logged).items()}

    @property
    def metrics(self) -> list[str]:
        """Public names: loss, accuracy, and all others in the order in which they were first logged."""
        return [LOSS, ACCURACY, *self.logged_names]

    def values(self, metric: str) -> dict[ClientId, float]:
        """A metric by client; nan for those that do not report it."""
        if metric in (LOSS, ACCURACY):
            return {cid: getattr(e, metric) for cid, e in self.by_client.items()}
        name = self.logged_names.get(metric, "")
        return {cid: e.others.get(name, math.nan) for cid, e in self.by_client.items()}

    def mean(self, metric: str) -> float:
        """Sample-weighted mean over the clients that report it."""
        known = [(v, self.by_client[cid].examples) for cid, v in self.values(metric).items() if not math.isnan(v)]
        total = sum(examples for _, examples in known)
        return sum(value * examples for value, examples in known) / total if total else math.nan

    def higher_is_better(self, metric: str) -> bool | None:
        """Whether higher values are better, by torchmetrics or by the name of the metric; None if neither says so."""
        if metric in (LOSS, ACCURACY):
            return metric == ACCURACY
        name = self.logged_names.get(metric, "")
        stated = (e.higher_is_better[name] for e in self.by_client.values() if name in e.higher_is_better)
        return next(stated, direction(name))

    def spread(self, metric: str, higher_is_better: bool | None) -> Spread:
        """A metric over the clients that report it."""
        known = [(v, cid) for cid, v in self.values(metric).items() if not math.isnan(v)]
        if not known:
            return Spread()
        values = torch.tensor([value for value, _ in known], dtype=torch.float64)
        mean, sd = self.mean(metric), float(values.std(correction=0))
        if higher_is_better is None:
            return Spread(mean, sd)
        worst = sorted(known, key=lambda pair: pair[0], reverse=not higher_is_better)[: math.ceil(len(known) / 10)]
        return Spread(mean, sd, sum(value for value, _ in worst) / len(worst), *worst[0])
