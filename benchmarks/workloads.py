"""What every contestant has to do in a round; with NumPy alone, for the sake of those without torch."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

CACHE = Path(__file__).parent / ".cache"

Samples = tuple[NDArray[np.float32], NDArray[np.int64]]


@dataclass(frozen=True)
class Workload:
    """``cohort`` of ``clients`` take ``steps`` steps on batches of ``batch`` each."""

    name: str
    model: str  # "mlp" (60-hidden-10) or "cnn" (LEAF's for FEMNIST)
    clients: int
    cohort: int
    steps: int
    batch: int
    samples: int  # of every client; 0 for those of synthetic-(1, 1)
    lr: float = 0.01
    eta: float = 1.0  # penalty of FedADMM
    hidden: int = 32  # units of the MLP

    @property
    def sample(self) -> tuple[int, ...]:
        return (60,) if self.model == "mlp" else (1, 28, 28)

    @property
    def classes(self) -> int:
        return 10 if self.model == "mlp" else 62

    def describe(self) -> str:
        model = f"MLP 60-{self.hidden}-10" if self.model == "mlp" else "FEMNIST CNN, 6.6 M parameters"
        return f"{model}, {self.cohort:,} of {self.clients:,} clients, {self.steps} steps of batch {self.batch}"

    def quick(self) -> Workload:
        """A tenth of it, to see whether everything runs."""
        small = {"clients": min(self.clients, 1000), "cohort": min(self.cohort, 100)}
        return replace(self, **small, steps=min(self.steps, 20))

    def data(self) -> list[Samples]:
        """Samples and labels by client."""
        if not self.samples:
            with np.load(CACHE / "synthetic.npz") as stored:
                cuts = np.cumsum(stored["sizes"])[:-1]
                return list(zip(np.split(stored["x"], cuts), np.split(stored["y"], cuts), strict=True))
        rng = np.random.default_rng(0)
        x = rng.standard_normal((self.clients, self.samples, *self.sample), dtype=np.float32)
        return list(zip(x, rng.integers(0, self.classes, (self.clients, self.samples)), strict=True))


WORKLOADS = {
    w.name: w
    for w in (
        Workload("W1", "mlp", clients=30, cohort=10, steps=300, batch=2, samples=0),
        Workload("W2", "cnn", clients=30, cohort=10, steps=300, batch=2, samples=100),
        Workload("W3", "mlp", clients=10_000, cohort=1_000, steps=20, batch=20, samples=100),
    )
}


def prepare() -> None:
    """Write down the synthetic set, for environments that have no lightning_fed."""
    from lightning_fed.datamodules import Synthetic

    CACHE.mkdir(exist_ok=True)
    data = Synthetic()
    data.setup("fit")
    held = [data.client_dataset(cid, "train").tensors for cid in data.client_ids]
    x, y = (np.concatenate([pair[k].numpy() for pair in held]) for k in (0, 1))
    np.savez(CACHE / "synthetic.npz", x=x, y=y, sizes=[len(labels) for _, labels in held])
