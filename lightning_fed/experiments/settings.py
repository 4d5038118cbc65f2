"""What the paper runs: 10 of 30 clients per round, 300 SGD steps of batch 2, step size 0.01, eta = alpha = 1."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import pytorch_lightning as pl

from lightning_fed import algorithms
from lightning_fed.algorithms import Algorithm
from lightning_fed.data import FederatedDataModule
from lightning_fed.datamodules import FEMNIST, Synthetic
from lightning_fed.datamodules.femnist import npz
from lightning_fed.models import MLP, FemnistCNN

CLIENTS, BATCH_SIZE, LR = 30, 2, 0.01

#: the two algorithms that coincide
PAIR = ("FedADMM", "FedDR")

Dtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class Setting:
    """One data set and the model trained on it.

    Args:
        name: of the folder with its results.
        threads: that are worth while; a second one only costs on the perceptron.
    """

    name: str
    model: Callable[[], pl.LightningModule]
    data: Callable[[int, Dtype], FederatedDataModule]
    threads: int | None = None


def synthetic(s: float) -> Setting:
    """The perceptron on synthetic-(s, s)."""
    return Setting(
        f"synthetic-({s:g},{s:g})",
        lambda: MLP(lr=LR, log_train=False),
        lambda seed, dtype: Synthetic(s, s, clients=CLIENTS, seed=seed, batch_size=BATCH_SIZE, dtype=dtype),
        threads=1,
    )


def femnist(path: Path | None = None) -> Setting:
    """LEAF's network on 30 writers of whatever lies at ``path``; without one, on generated handwriting."""

    def data(seed: int, dtype: Dtype) -> FEMNIST:
        core = path is not None and path.suffix == ".npz" and npz.core_writers(path) is not None
        least = 0 if path is None else 100
        return FEMNIST(
            path, writers=CLIENTS, core=core, min_samples=least, seed=seed, batch_size=BATCH_SIZE, dtype=dtype
        )

    name = "femnist-generated" if path is None else f"femnist-{path.stem}"
    return Setting(name, lambda: FemnistCNN(lr=LR, log_train=False), data)


def parse_algorithm(text: str) -> Algorithm:  # type: ignore[type-arg]
    """An algorithm by its name, with other hyper-parameters than its own after a colon.

    >>> parse_algorithm("FedProx:mu=0.5")
    FedProx(server_lr=1.0, weights='samples', stragglers=0.0, mu=0.5)
    """
    name, _, rest = text.partition(":")
    known: dict[str, type[Algorithm]] = {  # type: ignore[type-arg]
        name: getattr(algorithms, name) for name in algorithms.__all__ if name != "Algorithm"
    }
    if name not in known:
        raise ValueError(f"There is no algorithm {name!r}. Choose from {', '.join(sorted(known))}.")
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    for key, equals, _ in pairs:
        if not equals or key not in inspect.signature(known[name]).parameters:
            raise ValueError(f"{name} has no hyper-parameter {key!r}. It takes {inspect.signature(known[name])}.")
    return known[name](**{key: _value(value) for key, _, value in pairs})


def _value(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
