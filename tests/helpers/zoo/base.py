"""What an entry of the zoo is, and the small classifier that most of them vary."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, TensorDataset

from lightning_fed import FederatedDataModule

SIZES = {"a": 5, "b": 6, "c": 7}


def vectors() -> FederatedDataModule:
    """Three clients of 5, 6 and 7 samples: three batches of 3 cross the border of a local epoch for all of them."""
    return federation(lambda n, g: TensorDataset(*labelled(n, g)))


def federation(make: Callable[[int, torch.Generator], Dataset[Any]], batch_size: int = 3) -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    train = {cid: make(n, g) for cid, n in SIZES.items()}
    return FederatedDataModule(train, test={cid: make(3, g) for cid in SIZES}, batch_size=batch_size)


def labelled(n: int, g: torch.Generator) -> tuple[Tensor, Tensor]:
    return torch.randn(n, 4, generator=g, dtype=torch.float64), torch.randint(0, 3, (n,), generator=g)


class Tiny(pl.LightningModule):
    """A classifier of 43 parameters in float64."""

    lr = 0.3

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            self.build()
        self.double()

    def build(self) -> None:
        self.net = network()

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.loss(batch)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.lr)


class Manual(Tiny):
    def build(self) -> None:
        super().build()
        self.automatic_optimization = False


def network() -> nn.Sequential:
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))


def seeded(make: Callable[[], pl.LightningModule]) -> Callable[[], pl.LightningModule]:
    """For modules of others: the same weights whenever they are made, in float64."""

    def made() -> pl.LightningModule:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            return make().double()

    return made


@dataclass(frozen=True, eq=False)
class Entry:
    """An idiom, and what becomes of it.

    Args:
        name: of the row in docs/modules.md.
        make: the module, with the same weights whenever it is made.
        how: what the page says of it.
        data: three clients.
        trainer: options of the Trainer, here and in the oracle.
        callbacks: of the Trainer, here and in the oracle, made anew for each.
        steps: batches of a visit.
        dropped: ``"attribute of Class"`` that visits change, which is warned of: each starts from the server's.
        also_dropped: others, of which there may be a warning too.
        uncopyable: ``"attribute of Class"`` that is warned of.
        refused: the parameter that is refused, as a regular expression.
        lists: those to which a visit may append.
        ends_rounds: whether the server's module does something in ``on_train_epoch_end``, without a trainer.
        prepare: what earlier rounds have done to the attributes of the server's module.
        single: why clients cannot be shared between processes, as the refusal of ``workers=2`` says.
        quiet: pattern of a warning of Lightning's that comes with the idiom.
    """

    name: str
    make: Callable[[], pl.LightningModule]
    how: str = ""
    data: Callable[[], FederatedDataModule] = vectors
    trainer: Mapping[str, Any] = field(default_factory=dict)
    callbacks: Callable[[], list[pl.Callback]] = list
    steps: int = 3
    dropped: str | None = None
    also_dropped: tuple[str, ...] = ()
    uncopyable: str | None = None
    refused: str | None = None
    lists: Callable[[Any], list[list[Any]]] = lambda module: []
    ends_rounds: bool = False
    prepare: Callable[[Any, int], None] = lambda module, round: None
    single: str | None = None
    quiet: str | None = None

    @property
    def outcome(self) -> str:
        if self.refused is not None:
            return f"refused: Parameter `{self.refused}` was changed outside a client's visit"
        if self.dropped is not None:
            attribute, kind = self.dropped.split(" of ")
            return f"works; warns: Training changes the attribute `{attribute}` of `{kind}`"
        if self.uncopyable is not None:
            attribute, kind = self.uncopyable.split(" of ")
            return f"works; warns: attribute `{attribute}` of `{kind}` cannot be copied"
        if self.single is not None:
            return f"works; `workers=2` is refused: {self.single}"
        return "works"
