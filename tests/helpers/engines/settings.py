"""Every algorithm and many settings, on clients with less than a batch of samples, one batch and more."""

from __future__ import annotations

from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError

from helpers.engines.base import STACKED, Row
from helpers.problems import ALGORITHMS, name_of
from helpers.stacks import Smooth
from helpers.stacks import data as even
from lightning_fed import FederatedDataModule
from lightning_fed.algorithms import (
    Compressed,
    FedADMM,
    FedAvg,
    FedDR,
    FedDualAvg,
    FedDyn,
    FedMid,
    FedNova,
    FedPAQ,
    FedProx,
    FedSplit,
    Scaffold,
)
from lightning_fed.prox import L1
from lightning_fed.sampling import Bernoulli
from lightning_fed.transforms import TopK

BATCH, WIDTH = 5, 4
#: Samples of the clients: less than a batch, one batch, several, several and a short one.
SIZES = (7, 3, 10, 2, 5, 8, 15)
SEVENTEEN = (8, 5, 10) * 5 + (5, 12)
BUDGETS: dict[str, dict[str, Any]] = {
    "steps": {"local_steps": 4},
    "epochs": {"local_steps": None, "local_epochs": 1},
}


class Regression(pl.LightningModule):
    """In float64 throughout; logs its loss, a sum, and a metric. Small, for it is recorded many hundred times."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.optimizer, self.options = optimizer, {"lr": 0.05, **options}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(WIDTH, 1)
        self.error = MeanSquaredError()
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x).squeeze(1)
        loss = (found - y).square().mean()
        self.error.update(found, y)
        self.log("train_loss", loss, batch_size=len(y))
        self.log("samples", float(len(y)), reduce_fx="sum")
        self.log("train_error", self.error, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.options)


def uneven(sizes: tuple[int, ...] = SIZES, **options: Any) -> FederatedDataModule:
    g = torch.Generator().manual_seed(1)
    clients = {}
    for i, n in enumerate(sizes):
        x = torch.randn(n, WIDTH, generator=g, dtype=torch.float64) + i / len(sizes)
        y = (x @ torch.randn(WIDTH, generator=g, dtype=torch.float64)).tanh()
        clients[f"c{i}"] = TensorDataset(x, y)
    return FederatedDataModule(clients, **{"batch_size": BATCH, **options})


def smooth(name: str, algorithm: Any = None, model: dict[str, Any] | None = None, **kwargs: Any) -> Row:
    """A small network on five clients of 9 to 13 samples, in batches of 4."""
    options = {"local_steps": 7, **kwargs.pop("options", {})}
    clients = kwargs.pop("batch_size", 4)
    return Row(
        f"network, {name}",
        lambda: Smooth(**(model or {})),
        algorithm or FedADMM(eta=0.5),
        lambda: even(batch_size=clients),
        logs=frozenset({"train_loss", "train_acc", "confidence", "two"}),
        **{"rounds": 3, "options": options, "ways": STACKED, **kwargs},
    )


def linear(name: str, algorithm: Any = None, model: dict[str, Any] | None = None, **kwargs: Any) -> Row:
    """A linear model on seven clients of 2 to 15 samples, in batches of 5."""
    sizes = kwargs.pop("sizes", SIZES)
    return Row(
        f"linear, {name}",
        lambda: Regression(**(model or {})),
        algorithm or FedADMM(eta=0.5),
        lambda: uneven(sizes),
        logs=frozenset({"train_loss", "samples", "train_error"}),
        **{"ways": STACKED, **kwargs},
    )


ADAM, SGD = {"optimizer": torch.optim.Adam}, {"momentum": 0.9}
EPOCHS = {"local_steps": None, "local_epochs": 2}
BLOCKS = {"lightning_fed.engines.vectorized.STACK": 4, "lightning_fed.local.stacked.batches.BLOCK_BYTES": 1000}
SMALL_BLOCKS = {**BLOCKS, "lightning_fed.engines.vectorized.STACK": 2}
FREQUENT = {"recorded": 0, "one at a time": 10**9}


def part(algorithm: Any) -> dict[str, Any]:
    return {} if algorithm.traits.everybody else {"clients_per_round": 3}


def unstable(algorithm: Any) -> dict[str, str]:
    """The warning of a run whose dual steps are too long for clients of unequal weights, three of seven in a round."""
    steps = algorithm.dual_steps
    return {"all": "may diverge with ab"} if steps and steps.gain >= 1 and algorithm.weights == "samples" else {}


#: What `make quick` tries beside FedADMM: no dual variable, two exchanges, a prox after every step, everybody.
QUICK = (FedAvg, Scaffold, FedMid, FedSplit)

EVERY_ALGORITHM = [
    *(
        linear(
            f"steps, {name_of(algorithm)}",
            algorithm,
            options={**BUDGETS["steps"], **part(algorithm)},
            rounds=3,
            slow=type(algorithm) not in QUICK,
            warns=unstable(algorithm),
        )
        for algorithm in ALGORITHMS
    ),
    *(
        linear(f"epochs, {name_of(algorithm)}", algorithm, options=BUDGETS["epochs"], ways=["recorded"], slow=True)
        for algorithm in ALGORITHMS
        if getattr(algorithm, "vectors", 2) == 2  # Scaffold(vectors=1) needs visits of equal length
    ),
    *(
        smooth(
            name_of(algorithm), algorithm, options=part(algorithm), in_c=True, slow=not isinstance(algorithm, FedADMM)
        )
        for algorithm in (FedADMM(eta=0.5), FedDR(), FedAvg())
    ),
    *(
        linear(
            f"{budget}, everybody, {name_of(algorithm)}",
            algorithm,
            options=options,
            in_c=True,
            slow=not isinstance(algorithm, FedADMM),
        )
        for budget, options in BUDGETS.items()
        for algorithm in (FedADMM(eta=0.5), FedAvg(), Scaffold())
    ),
]

OF_A_NETWORK = [
    smooth("stragglers", FedProx(mu=0.3, stragglers=0.7), options={"clients_per_round": 4}),
    smooth("top k", Compressed(FedADMM(eta=1.0), TopK(20)), options={"clients_per_round": 4}),
    smooth("quantised", FedPAQ(levels=4), options={"clients_per_round": 4}),
    *(
        smooth(
            f"{optimizer}, {clip}",
            model={"optimizer": optimizer},
            trainer=clip,
            tolerance=1e-9,
            slow=(optimizer == "adam") != bool(clip),
        )
        for optimizer in ("momentum", "adam")
        for clip in ({}, {"gradient_clip_val": 0.1})
    ),
    smooth("clipped by norm", trainer={"gradient_clip_val": 0.05}, in_c=True),
    smooth("clipped by value", trainer={"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}, in_c=True),
    smooth(
        "cohorts of any size, learning rate by round",
        model={"scheduler": "epoch"},
        options={"sampler": Bernoulli(0.5)},
        rounds=6,
        in_c=True,
    ),
    smooth("epochs", options=EPOCHS, in_c=True),
    smooth("epochs, adam", model={"optimizer": "adam"}, options=EPOCHS, tolerance=1e-9, slow=True),
    smooth("small blocks", patches=SMALL_BLOCKS, in_c=True),
    *(
        smooth(
            f"batches of {size} {how}, {name}",
            model=model,
            batch_size=size,
            options=options,
            patches={"lightning_fed.engines.selection.FREQUENT": often},
            tolerance=1e-9 if model else 1e-10,
            ways=STACKED if name == "epochs" else ["recorded"],
            slow=True,
        )
        for how, often in FREQUENT.items()
        for size in (4, 11)
        for name, options, model in (("steps", {}, {}), ("epochs", EPOCHS, {}), ("Adam", EPOCHS, {"optimizer": "adam"}))
    ),
]

#: Of these optimizers, `make quick` tries a variant with more in it.
COVERED = ("decay", "Adam", "Adam, decay")

OF_UNEVEN_CLIENTS = [
    *(
        linear(f"{budget}, {name}", algorithm, model, options=options, slow=budget == "steps" or name in COVERED)
        for budget, options in BUDGETS.items()
        for name, algorithm, model in (
            ("momentum", FedADMM(eta=0.5), SGD),
            ("Nesterov, decay", FedAvg(), {**SGD, "nesterov": True, "weight_decay": 0.01}),
            ("decay", FedDyn(alpha=0.5), {"weight_decay": 0.01}),
            ("Adam", FedDR(eta_hat=2.0), ADAM),
            ("Adam, decay", FedADMM(eta=0.5), {**ADAM, "weight_decay": 0.01}),
            ("Adam, stragglers", FedProx(mu=0.1, stragglers=0.5), ADAM),
        )
    ),
    *(
        linear(f"{budget}, blocks", options=options, patches=BLOCKS, slow=budget == "steps")
        for budget, options in BUDGETS.items()
    ),
    linear("momentum, blocks", FedAvg(), SGD, options=EPOCHS, patches=BLOCKS, slow=True),
    linear("momentum, unlike numbers of steps", FedNova(), SGD, options=EPOCHS, ways=["recorded"], slow=True),
    *(
        linear(
            f"{budget}, three in a round",
            options={**options, "clients_per_round": 3},
            rounds=4,
            slow=budget == "steps",
        )
        for budget, options in BUDGETS.items()
    ),
    linear(
        "cohorts of any size",
        FedDR(eta_hat=2.0),
        options={**BUDGETS["epochs"], "sampler": Bernoulli(0.4)},
        rounds=5,
    ),
    linear("few batches", options=EPOCHS, trainer={"limit_train_batches": 3}),
    linear("clipped", options=EPOCHS, trainer={"gradient_clip_val": 0.05}),
    linear("always the same batch", options={"local_steps": 5}, trainer={"overfit_batches": 1}),
    *(
        linear(
            f"filled up with copies, {name}",
            algorithm,
            model,
            options=BUDGETS["epochs"],
            sizes=(8, 5, 10) * 5 + (5, 12),
            slow=name in ("plain", "mapped after steps"),
        )
        for name, algorithm, model in (
            ("plain", FedADMM(eta=0.5), {}),
            ("momentum", FedADMM(eta=0.5), SGD),
            ("mapped after steps", FedMid(g=L1(0.1)), {}),
            ("mapped before gradients", FedDualAvg(g=L1(0.1)), {}),
        )
    ),
]

SETTINGS = [*EVERY_ALGORITHM, *OF_A_NETWORK, *OF_UNEVEN_CLIENTS]
