"""The paper's settings: 10 of 30 clients per round, 300 SGD steps of batch 2, step size 0.01, eta = alpha = 1."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from difflib import get_close_matches
from pathlib import Path
from typing import Any, Literal

from lightning_fed import algorithms, transforms
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedDR
from lightning_fed.data.datamodule import FederatedDataModule
from lightning_fed.datamodules import FEMNIST, Synthetic
from lightning_fed.datamodules.femnist import Pixels, Selection, npz
from lightning_fed.lightning import pl
from lightning_fed.models import MLP, FemnistCNN
from lightning_fed.transforms import Compose, Transform

CLIENTS, BATCH_SIZE, LR = 30, 2, 0.01

#: Step size of the perceptron that replaces LEAF's network in quick runs.
SMALL_LR = 0.03

#: The two equal algorithms; in the reproduced experiments local work starts at the client's own last model.
PAIR: dict[str, Algorithm] = {  # type: ignore[type-arg]
    "FedADMM": FedADMM(eta=1.0, alpha=1.0, start="local"),
    "FedDR": FedDR(eta_hat=1.0, alpha=1.0, start="local"),
}

Dtype = Literal["float32", "float64"]


@dataclass(frozen=True)
class Setting:
    """One data set and the model trained on it.

    Args:
        name: name of the folder with its results.
        threads: best number of torch's threads; on the perceptron a second one only costs time.
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


def femnist(path: Path | None = None, small: bool = False) -> Setting:
    """LEAF's network on 30 writers of the data at ``path``; without a path, on generated handwriting.

    With ``small`` a perceptron of 54,000 weights replaces the network of 6.6 million, which takes minutes per round.
    """

    def data(seed: int, dtype: Dtype) -> FEMNIST:
        core = path is not None and path.suffix == ".npz" and npz.core_writers(path) is not None
        selection = Selection(core=core, min_samples=0 if path is None else 100)
        return FEMNIST(
            path,
            writers=CLIENTS,
            selection=selection,
            pixels=Pixels(dtype=dtype),
            seed=seed,
            batch_size=BATCH_SIZE,
        )

    name = "femnist-generated" if path is None else f"femnist-{path.stem}"
    if small:
        return Setting(f"{name}-small", lambda: MLP((784, 64, 62), lr=SMALL_LR, log_train=False), data, threads=1)
    return Setting(name, lambda: FemnistCNN(lr=LR, log_train=False), data)


def parse_algorithm(text: str) -> Algorithm:  # type: ignore[type-arg]
    """Build an algorithm from its name, hyper-parameters after a colon, and transforms of uploads after a plus.

    >>> parse_algorithm("FedProx:mu=0.5")
    FedProx(server_lr=1.0, weights='samples', stragglers=0.0, mu=0.5)
    >>> parse_algorithm("FedAvg+Quantize:levels=4").transform
    Quantize(levels=4, per='vector')
    """
    name, *through = re.split(r"\+(?=[A-Za-z])", text)
    algorithm: Algorithm = _build("algorithm", name, _classes(algorithms, Algorithm, but=Compressed))  # type: ignore[type-arg]
    steps = [_build("transform", step, _classes(transforms, Transform, but=Compose)) for step in through]
    if not steps:
        return algorithm
    return Compressed(algorithm, steps[0] if len(steps) == 1 else Compose(steps))


def _classes(module: Any, base: type, but: type) -> dict[str, type]:
    """The public subclasses of ``base``, which can be built from numbers and words alone."""
    found = {name: getattr(module, name) for name in module.__all__}
    return {
        name: kind
        for name, kind in found.items()
        if isinstance(kind, type) and issubclass(kind, base) and kind not in (base, but)
    }


def _build(what: str, text: str, known: Mapping[str, type]) -> Any:
    name, _, rest = text.partition(":")
    if name not in known:
        near = get_close_matches(name, known, n=1)
        hint = f"Did you mean {near[0]}? " if near else ""
        raise ValueError(f"There is no {what} {name!r}. {hint}Choose from {', '.join(sorted(known))}.")
    parameters = inspect.signature(known[name]).parameters
    pairs = [pair.partition("=") for pair in rest.split(",") if pair]
    for key, _, value in pairs:
        if key not in parameters:
            takes = f"It takes {', '.join(parameters)}." if parameters else "It takes none."
            raise ValueError(f"{name} has no hyper-parameter {key!r}. {takes}")
        if not value:
            raise ValueError(f"{key!r} of {name} needs a value, for instance {name}:{key}=1; got {text!r}.")
    given = {key: _value(value) for key, _, value in pairs}
    missing = [key for key, p in parameters.items() if p.default is inspect.Parameter.empty and key not in given]
    if missing:
        raise ValueError(f"{name} needs {missing[0]!r}, for instance {name}:{missing[0]}=10; got {text!r}.")
    return known[name](**given)


def _value(text: str) -> int | float | str:
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            pass
    return text
