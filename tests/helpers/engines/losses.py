"""Losses, logs and settings of all sorts, which clients trained side by side must not get wrong."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any

import torch
from pytorch_lightning.callbacks import GradientAccumulationScheduler
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.data import TensorDataset
from torchmetrics import SumMetric
from torchmetrics.classification import MulticlassAUROC

from helpers.engines.base import ONE_BY_ONE, STACKED, Odd, Row, data
from helpers.modules import Net
from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import FedAvg
from lightning_fed.callbacks import FederatedCallback


class WeightsClasses(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y, weight=x.new_tensor([1.0, 2.0, 5.0]))


class SumsLosses(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y, reduction="sum")


class LogsARoot(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("root", loss.sqrt())


class LogsACount(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("count", float(len(y)))


class WeighsBatchesEqually(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.log("train_loss", loss, batch_size=1)


class MetersBatches(Odd):
    def build(self) -> None:
        self.meter = SumMetric()

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.meter.update(loss.reshape(1))
        self.log("meter", self.meter)


class KeepsScores(Odd):
    def build(self) -> None:
        self.area = MulticlassAUROC(3)

    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        self.area.update(self(x).detach(), y)
        self.log("area", self.area, on_step=False, on_epoch=True)


def one_label_first() -> FederatedDataModule:
    """The first two clients have one sample, and so one label."""
    odd = data()
    for cid in ("c0", "c1"):
        x, y = odd.splits["train"][cid].tensors
        odd.splits["train"][cid] = TensorDataset(x[:1], y[:1] * 0 + int(cid[1]))
    return odd


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


class Settings(Odd):
    """Reads a factor from where ``place`` says; callbacks change it there."""

    place = ""

    def build(self) -> None:
        self.hparams.factor = self._factor = 1.0
        self.config, self.nested = types.SimpleNamespace(factor=1.0), {"of": [{"factor": 1.0}]}

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        known = {"hparams": self.hparams, "config": vars(self.config), "nested": self.nested["of"][0]}
        known |= {"private": {"factor": self._factor}}
        return super().loss(x, y) * known[self.place]["factor"]


class Changes(FederatedCallback):
    def on_round_start(self, trainer: Any, module: Any, round: int, cohort: Any) -> None:
        place, factor = module.place, 1.0 + round
        if place == "private":
            module._factor = factor
        else:
            homes = {"hparams": module.hparams, "config": vars(module.config), "nested": module.nested["of"][0]}
            homes[place]["factor"] = factor


class Scaled(Odd):
    """Its factor is an attribute of the class, until a callback gives the module one of its own."""

    factor = 1.0

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.factor * super().loss(x, y)


class Scales(FederatedCallback):
    def on_round_start(self, trainer: Any, module: Any, round: int, cohort: Any) -> None:
        module.factor = 1.0 + round


def changing(place: str) -> type[Settings]:
    return type("Settings", (Settings,), {"place": place})


class Pools(Odd):
    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return super().loss(x.mean(1), y)


def series() -> FederatedDataModule:
    """The last client has shorter samples than the others."""
    odd = data()
    odd.splits.pop("test")
    for i, (cid, dataset) in enumerate(odd.splits["train"].items()):
        x, y = dataset.tensors
        odd.splits["train"][cid] = TensorDataset(torch.stack([x] * (5 if i < 3 else 2), 1).cumsum(1), y)
    return odd


class Divided(Odd):
    """A mean that is written as a sum over a plain number."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return nn.functional.cross_entropy(self(x), y, reduction="sum") / len(y)


class Pairs(Odd):
    """Its last bias has a gradient that is zero but for rounding."""

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        scores = self(x)
        return (scores.unsqueeze(0) - scores.unsqueeze(1)).square().mean()


class Frozen(Odd):
    def configure_optimizers(self) -> Any:
        self.net[0].requires_grad_(False)
        return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)


class Convolves(Odd):
    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.conv = nn.Conv1d(1, 1, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.conv(x.unsqueeze(1)).squeeze(1))


class Sorting(Net):
    """Sorts, for which there is no C code."""

    def __init__(self) -> None:
        super().__init__()
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.cumsum(1)) + self.net[0].weight.flatten().sort().values[:3]


class CannotBePickled(Odd):
    def build(self) -> None:
        parametrizations.weight_norm(self.net[0])
        self.after = lambda loss: 2 * loss

    def loss(self, x: Tensor, y: Tensor) -> Tensor:
        return self.after(super().loss(x, y))


class Other(Odd):
    """Activations and norms that there is C code for."""

    layers: Callable[[], list[nn.Module]]

    def build(self) -> None:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Sequential(*type(self).layers())


LAYERS: dict[str, Callable[[], list[nn.Module]]] = {
    "relu": lambda: [nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.Sigmoid(), nn.Linear(6, 3)],
    "layer norm": lambda: [nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)],
    "leaky": lambda: [
        nn.Linear(6, 5, bias=False),
        nn.LeakyReLU(0.2),
        nn.Linear(5, 3),
        nn.Softplus(),
        nn.Hardtanh(),
    ],
    "silu": lambda: [nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 3), nn.ELU()],
}

EPOCHS = {"local_steps": None, "local_epochs": 2}
KINDS = (WeightsClasses, SumsLosses, LogsARoot, LogsACount, WeighsBatchesEqually, MetersBatches, KeepsScores)
PLACES = ("hparams", "config", "nested", "private")

LOSSES = [
    *(Row(kind.__name__, kind, FedAvg()) for kind in KINDS),
    *(
        Row(f"{kind.__name__}, {name}", kind, FedAvg(), own, options=options, ways=STACKED, slow=True)
        for kind in KINDS
        for name, own, options in (
            ("epochs", data, EPOCHS),
            ("one label first", one_label_first, {}),
            ("one label first, epochs", one_label_first, EPOCHS),
        )
    ),
    Row("a mean at first: flooded", Flood, options={"local_steps": 40}, ways=STACKED),
    Row("a mean at first: rare class", Weighs, data=rare, options={"local_steps": 40}, ways=STACKED),
    *(
        Row(
            f"changed between rounds in {place}",
            changing(place),
            callbacks=lambda: [Changes()],
            slow=place in ("config", "private"),
        )
        for place in PLACES
    ),
    Row("changed between rounds in the class", Scaled, callbacks=lambda: [Scales()]),
    Row("samples of different shapes", Pools, data=series),
    Row("sum over a plain number", Divided, in_c=True),
    Row("gradient zero but for rounding", Pairs),
    Row("what cannot be pickled", CannotBePickled, ways=ONE_BY_ONE),
    Row("frozen layer", Frozen),
    Row("convolution", Convolves, rounds=1),
    Row("sorting, for which there is no C", Sorting, in_c=False),
    *(
        Row(f"layers: {name}", type("Other", (Other,), {"layers": staticmethod(layers)}), in_c=True)
        for name, layers in LAYERS.items()
    ),
    Row(
        "accumulation that begins in the second round",
        Odd,
        callbacks=lambda: [GradientAccumulationScheduler({0: 1, 1: 2})],
        warns=dict.fromkeys(STACKED, "gradients are accumulated"),
    ),
]
