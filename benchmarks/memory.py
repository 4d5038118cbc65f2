"""Memory, disk and time of federations with many clients or rounds: ``python benchmarks/memory.py --help``.

Prints a line for every few rounds (resident memory, descriptors, seconds of the clock and of the CPU, clients visited)
and at the end a summary, which ``make soak`` checks (tests/integration/test_soak.py).
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import tempfile
import time
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.models import MLP, FemnistCNN
from lightning_fed.sampling import Sampler, Uniform

#: Inputs, and how a module is made of them: FEMNIST's CNN, a perceptron of 54,270 parameters, and the MLP of 2,282.
MODELS: dict[str, tuple[tuple[int, ...], int, Any]] = {
    "cnn": ((1, 28, 28), 62, FemnistCNN),
    "perceptron": ((784,), 62, lambda: MLP((784, 64, 62))),
    "mlp": ((60,), 10, lambda: MLP((60, 32, 10))),
}


@dataclass(frozen=True)
class Scenario:
    """``rounds`` of ``cohort`` of ``clients``; those from ``wave[0]`` to ``wave[1]`` visit ``large`` of them."""

    model: str
    rounds: int
    clients: int = 3500
    cohort: int = 10
    samples: int = 10
    steps: int = 2
    wave: tuple[int, int] = (0, 0)
    large: int = 1000


SCENARIOS = {
    "cnn": Scenario("cnn", rounds=80),
    "perceptron": Scenario("perceptron", rounds=400),
    "long": Scenario("mlp", rounds=10_000, clients=100),
    "many": Scenario("mlp", rounds=500, clients=10_000),
    "visited": Scenario("mlp", rounds=170, clients=100_000, wave=(50, 120)),
}


@dataclass(frozen=True)
class Wave(Sampler):
    """Uniform cohorts, larger ones in some rounds."""

    size: int
    large: int
    wave: tuple[int, int]

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        return Uniform(self.size).draw(n, rng)

    def cohort(self, n: int, seed: int, round: int) -> list[int]:
        size = self.large if self.wave[0] <= round < self.wave[1] else self.size
        return Uniform(size).cohort(n, seed, round)

    def inclusion_probabilities(self, n: int) -> Any:
        return Uniform(self.size).inclusion_probabilities(n)


def rss() -> float:
    """Resident memory of this process, in MB."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096 / 1e6


def data(scenario: Scenario) -> FederatedDataModule:
    shape, classes, _ = MODELS[scenario.model]
    g = torch.Generator().manual_seed(0)
    x = torch.rand(scenario.clients * scenario.samples, *shape, generator=g)
    y = torch.randint(classes, (len(x),), generator=g)
    parts = zip(x.split(scenario.samples), y.split(scenario.samples), strict=True)
    return FederatedDataModule({f"f{i:06}": TensorDataset(*part) for i, part in enumerate(parts)}, batch_size=10)


def now() -> tuple[float, float]:
    """Seconds of the clock, and of this process on the CPU, which the load of the machine decides less."""
    return time.perf_counter(), time.process_time()


class Clock(pl.Callback):
    """Notes every round: seconds of the clock and of the CPU for its training, and for its checkpoint (``save``)."""

    def __init__(self, every: int) -> None:
        self.every, self.begun = every, (0.0, 0.0)
        self.start: tuple[float, float] | None = None  # seconds until the first round began
        self.rounds: list[dict[str, Any]] = []
        self._began = self._ended = (0.0, 0.0)

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = now()
        if self.start is None:
            self.start = self._began[0] - self.begun[0], self._began[1] - self.begun[1]
        else:
            self._close()
            self._began = now()

    def on_train_batch_end(self, trainer: pl.Trainer, *_: Any) -> None:
        seconds, cpu = (end - began for end, began in zip(now(), self._began, strict=True))
        visited = len(trainer.fit_loop.server.federation.store)
        self.rounds.append({"round": trainer.current_epoch, "seconds": seconds, "cpu": cpu, "visited": visited})
        self._ended = now()

    def on_train_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self._began = now()
        self._close()

    def _close(self) -> None:
        """After the checkpoint of a round."""
        last = self.rounds[-1]
        last |= {"save": self._began[0] - self._ended[0], "save_cpu": self._began[1] - self._ended[1]}
        last |= {"rss": rss(), "descriptors": len(os.listdir("/proc/self/fd"))}
        if last["round"] % self.every == 0:
            print(json.dumps({k: round(v, 3) if isinstance(v, float) else v for k, v in last.items()}), flush=True)


def fit(scenario: Scenario, folder: Path, every: int, resume: bool = False) -> tuple[Clock, FederatedServer, Any]:
    module, held = MODELS[scenario.model][2](), data(scenario)
    server = FederatedServer(
        FedADMM(eta=1.0),
        sampler=Wave(scenario.cohort, scenario.large, scenario.wave),
        local_steps=scenario.steps,
        evaluate_every=0,
        figure=False,
        seed=0,
        store="disk",
    )
    clock = Clock(every)
    trainer = pl.Trainer(
        max_epochs=scenario.rounds,
        callbacks=[server, clock, ModelCheckpoint(folder, save_last="link")],
        default_root_dir=folder,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        accelerator="cpu",
    )
    clock.begun = now()
    trainer.fit(module, datamodule=held, ckpt_path="last" if resume else None)
    return clock, server, module


def run(scenario: Scenario, folder: Path, every: int) -> dict[str, Any]:
    """Figures of a fit, and of the beginning of one that goes on from its last checkpoint."""
    clock, server, module = fit(scenario, folder, every)
    files = {f.stat().st_ino: f for f in folder.rglob("*") if f.is_file() and f.suffix != ".ckpt"}
    size = sum(f.stat().st_blocks * 512 for f in files.values())
    model = sum(p.numel() * p.element_size() for p in module.parameters())
    visited = len(server.federation.store)
    del server
    again, *_ = fit(replace(scenario, rounds=scenario.rounds + 1), folder, every, resume=True)
    rounds = clock.rounds
    first, last = rounds[1 : 1 + min(49, len(rounds) // 4)], rounds[-min(50, len(rounds) // 4) :]
    early = next(r["rss"] for r in rounds if r["round"] == min(20, len(rounds) - 1))

    def median(of: list[dict[str, Any]], what: str) -> float:
        return statistics.median(r[what] for r in of)

    return {
        **asdict(scenario),
        "visited": visited,
        "bytes": size,
        "models_per_client": size / visited / model,
        "start": clock.start,
        "start_again": again.start,
        "peak_rss": max(r["rss"] for r in rounds),
        "growth_from_round_20": max(r["rss"] for r in rounds[20:]) - early,
        "growth_by_1000": _slope([r["rss"] for r in rounds]) * 1000,
        "descriptors": [rounds[min(20, len(rounds) - 1)]["descriptors"], max(r["descriptors"] for r in rounds[20:])],
        **{f"{what}_first": median(first, what) for what in ("seconds", "cpu", "save", "save_cpu")},
        **{f"{what}_last": median(last, what) for what in ("seconds", "cpu", "save", "save_cpu")},
    }


def _slope(values: list[float]) -> float:
    """Growth by round in the last three quarters, by least squares."""
    kept = np.asarray(values[len(values) // 4 :])
    return float(np.polyfit(np.arange(len(kept)), kept, 1)[0])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("scenario", choices=list(SCENARIOS))
    parser.add_argument("--rounds", type=int, help="other than the scenario's")
    parser.add_argument("--every", type=int, default=10, help="rounds between two lines")
    parser.add_argument("--dir", default=".", help="where a folder for the run is made, and removed")
    parser.add_argument("--out", type=Path, help="a file for the summary, in JSON")
    given = parser.parse_args()
    scenario = SCENARIOS[given.scenario]
    scenario = scenario if given.rounds is None else replace(scenario, rounds=given.rounds)
    folder = Path(tempfile.mkdtemp(dir=given.dir))
    try:
        found = run(scenario, folder, given.every)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    print(json.dumps(found, indent=1))
    if given.out is not None:
        given.out.write_text(json.dumps(found))


if __name__ == "__main__":
    main()
