"""Digests of what every algorithm computes in every engine: equal before and after a change that moves no number.

    python tests/digest.py before.json                        # on the old tree
    python tests/digest.py after.json --compare before.json   # on the new one: names what differs, exit code 1

Runs every algorithm on small problems through ``simulate`` and ``Trainer.fit`` (one by one, stacked, in C, workers;
in float64 and float32; interrupted and resumed) and one run with W&B offline. Digests are of bits, so both trees have
to be run on one machine. Only public names are imported, so that the script fits both.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import os
import sys
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer, GradientDescent, Quadratic, simulate
from lightning_fed.algorithms import (
    Compressed,
    FedAdagrad,
    FedAdam,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedDR,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedNova,
    FedPD,
    FedPrimalDual,
    FedProx,
    FedSplit,
    FedYogi,
    ParallelDRS,
    Scaffold,
)
from lightning_fed.prox import L1, Box
from lightning_fed.transforms import TopK

ROUNDS, CLIENTS = 3, 5

ALGORITHMS: dict[str, Any] = {
    "FedADMM": FedADMM(eta=1.0),
    "FedADMM, local, L1": FedADMM(eta=2.0, alpha=1.2, g=L1(1e-3), weights="samples", start="local"),
    "FedADMM, seen": FedADMM(eta=1.0, mean="seen"),
    "FedADMM, active": FedADMM(eta="auto", g=L1(1e-3), mean="active"),
    "FedPrimalDual": FedPrimalDual(weights="samples"),
    "FedDR": FedDR(eta_hat=1.0, g=Box(-1.0, 1.0)),
    "FedDRII": FedDRII(eta_hat=1.0),
    "ParallelDRS": ParallelDRS(eta_hat=0.5),
    "FedPD": FedPD(eta_hat=1.0, skip=0.5),
    "FedAvg": FedAvg(),
    "FedProx": FedProx(mu=0.5),
    "FedAvgM": FedAvgM(),
    "FedAdam": FedAdam(),
    "FedYogi": FedYogi(),
    "FedAdagrad": FedAdagrad(),
    "FedNova": FedNova(stragglers=0.5),
    "FedNova, penalty": FedNova(mu=0.5, tau_eff="norm"),
    "FedDyn": FedDyn(alpha=1.0),
    "FedSplit": FedSplit(s=0.5),
    "Scaffold": Scaffold(),
    "FedLin": FedLin(),
    "FedMid": FedMid(g=L1(1e-3)),
    "FedDualAvg": FedDualAvg(g=L1(1e-3)),
    "compressed FedADMM": Compressed(FedADMM(eta=1.0), TopK(20)),
}
#: Settings of the server by engine.
ENGINES: dict[str, dict[str, Any]] = {
    "one by one": {"engine": "sequential"},
    "stacked": {"engine": "vectorized", "compile": False},
    "in C": {"engine": "vectorized", "compile": True},
    "workers": {"engine": "sequential", "workers": 2},
}


class Net(pl.LightningModule):
    """A classifier whose steps can be stacked."""

    stackable = loss_is_mean = True

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype)

    def _step(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.log(f"{stage}_loss", loss, batch_size=len(y))
        self.log(f"{stage}_acc", (logits.argmax(1) == y).to(loss.dtype).mean(), batch_size=len(y))
        return loss

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._step(batch, "val")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class Habits(Net):
    """What only one-by-one training takes: BatchNorm, dropout, Adam, a scheduler by step, a momentum encoder."""

    stackable = loss_is_mean = False

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.net = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), nn.Dropout(0.2), nn.Linear(8, 3)).to(
            dtype
        )
        self.slow = nn.Linear(6, 8).to(dtype).requires_grad_(False)
        self.outputs: list[Tensor] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.training:
            self.outputs.append(loss.detach())
            with torch.no_grad():
                self.slow.weight.lerp_(self.net[0].weight, 0.1)
        return loss * (1 + 0.01 * self.global_step)

    def on_train_epoch_end(self) -> None:
        self.log("mean_output", torch.stack(self.outputs).mean())
        self.outputs.clear()

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.net.parameters(), lr=0.01)
        cosine = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, 50)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": cosine, "interval": "step"}}


def data(dtype: torch.dtype) -> FederatedDataModule:
    g = torch.Generator().manual_seed(0)
    train, test = {}, {}
    for i in range(CLIENTS):
        x = torch.randn(14 + 3 * i, 6, generator=g, dtype=dtype) + i / CLIENTS
        y = (x @ torch.randn(6, 3, generator=g, dtype=dtype)).argmax(1)
        train[f"c{i}"], test[f"c{i}"] = TensorDataset(x[4:], y[4:]), TensorDataset(x[:4], y[:4])
    return FederatedDataModule(train, test=test, batch_size=4)


def digest(value: Any) -> str:
    """A hash of names, numbers and the bits of tensors."""
    found = hashlib.sha256()
    for name, leaf in leaves("", value):
        found.update(name.encode())
        if isinstance(leaf, Tensor):
            found.update(f"{leaf.dtype} {tuple(leaf.shape)}".encode())
            found.update(leaf.detach().cpu().contiguous().numpy().tobytes())
        else:
            found.update(repr(leaf).encode())
    return found.hexdigest()[:16]


def leaves(name: str, value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict):
        for key in value:
            yield from leaves(f"{name}.{key}", value[key])
    elif is_dataclass(value):
        for field in fields(value):
            yield from leaves(f"{name}.{field.name}", getattr(value, field.name))
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from leaves(f"{name}.{i}", part)
    else:
        yield name, value


class Logged(pl.Callback):
    """What is logged in each round, but for times."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        metrics = trainer.callback_metrics
        self.rounds.append({name: float(metrics[name]) for name in sorted(metrics) if "seconds" not in name})


def trainer_of(server: FederatedServer, rounds: int, *callbacks: pl.Callback, **kwargs: Any) -> pl.Trainer:
    quiet: dict[str, Any] = {"enable_progress_bar": False, "enable_model_summary": False, "accelerator": "cpu"}
    quiet |= {"logger": False, "enable_checkpointing": False, **kwargs}
    return pl.Trainer(max_epochs=rounds, callbacks=[server, *callbacks], **quiet)


def fitted(
    algorithm: Any, kind: type[Net], dtype: torch.dtype, resume: bool = False, **settings: Any
) -> dict[str, str]:
    """Digests of the model, server, clients and log of a fit."""
    cohort = {} if algorithm.traits.everybody else {"clients_per_round": 3}
    settings = {**cohort, "local_steps": 5, "seed": 1, "figure": False, **settings}
    if not resume:
        server, module, logged = FederatedServer(algorithm, **settings), kind(dtype), Logged()
        trainer_of(server, ROUNDS, logged).fit(module, datamodule=data(dtype))
    else:
        with tempfile.TemporaryDirectory() as folder:
            path = str(Path(folder, "middle.ckpt"))
            first = trainer_of(FederatedServer(algorithm, **settings), 1)
            first.fit(kind(dtype), datamodule=data(dtype))
            first.save_checkpoint(path)
            server, module, logged = FederatedServer(algorithm, **settings), kind(dtype), Logged()
            trainer_of(server, ROUNDS, logged).fit(module, datamodule=data(dtype), ckpt_path=path)
    federation: Any = server.federation
    clients = {str(cid): federation.store[cid] for cid in federation.client_ids}
    log = logged.rounds[-1:] if resume else logged.rounds
    parts = {"model": module.state_dict(), "server": federation.server, "clients": clients, "log": log}
    return {name: digest(part) for name, part in parts.items()}


def simulated(algorithm: Any) -> dict[str, str]:
    g = torch.Generator().manual_seed(0)
    matrices = [torch.randn(4, 4, generator=g, dtype=torch.float64) for _ in range(CLIENTS)]
    clients = [Quadratic(A @ A.T / 4 + torch.eye(4), A[0], i + 1) for i, A in enumerate(matrices)]
    found = simulate(algorithm, clients, rounds=6, solver=GradientDescent(3, 0.05))
    return {"x_bar": digest(found.x_bar)}


def tracked() -> dict[str, str]:
    """Keys and values that W&B holds after an offline run, but for times."""
    from lightning_fed.tracking import AutoWandbLogger

    sys.path.insert(0, str(Path(__file__).parent))
    from helpers.wandb_reader import read_run

    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"WANDB_MODE": "offline", "WANDB_SILENT": "true", "WANDB_DIR": folder}
        logger = AutoWandbLogger(project="digest", save_dir=folder, offline=True)
        server = FederatedServer(FedADMM(), clients_per_round=3, local_steps=5, seed=1)
        trainer_of(server, 2, logger=logger).fit(Net(torch.float64), datamodule=data(torch.float64))
        logger.experiment.finish()
        history = read_run(Path(folder)).history
    rows = [{k: row[k] for k in sorted(row) if not _is_of_the_moment(k, row[k])} for row in history]
    return {"wandb": digest(rows)}


def _is_of_the_moment(key: str, value: Any) -> bool:
    """Whether a row's value differs from run to run: times, and names of files."""
    return key.startswith("_") or "seconds" in key or isinstance(value, dict)


def everything() -> dict[str, dict[str, str]]:
    found = {f"simulate: {name}": simulated(algorithm) for name, algorithm in ALGORITHMS.items()}
    for name, algorithm in ALGORITHMS.items():
        for engine, settings in ENGINES.items():
            for dtype in (torch.float64, torch.float32):
                label = f"{engine}, {str(dtype).removeprefix('torch.')}: {name}"
                found[label] = fitted(algorithm, Net, dtype, **settings)
        found[f"resumed: {name}"] = fitted(algorithm, Net, torch.float64, resume=True)
        print(name, file=sys.stderr, flush=True)
    for name in ("FedADMM", "FedAvg"):
        for policy in ("average", "server", "local"):
            for workers in (1, 2):
                settings = {"buffers": policy, "workers": workers}
                label = f"habits, {policy}, {workers} workers: {name}"
                found[label] = fitted(ALGORITHMS[name], Habits, torch.float64, **settings)
            label = f"habits, {policy}, resumed: {name}"
            found[label] = fitted(ALGORITHMS[name], Habits, torch.float64, resume=True, buffers=policy)
    found["W&B"] = tracked()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--compare", type=Path, help="digests of another tree")
    args = parser.parse_args()
    warnings.simplefilter("ignore")
    logging.getLogger("pytorch_lightning").setLevel(logging.ERROR)
    torch.set_num_threads(1)
    found = everything()
    args.out.write_text(json.dumps(found, indent=1) + "\n")
    if args.compare is None:
        return 0
    before = json.loads(args.compare.read_text())
    differing = [name for name in before.keys() | found.keys() if before.get(name) != found.get(name)]
    for name in sorted(differing):
        print(f"{name}: {before.get(name)} -> {found.get(name)}")
    print(f"{len(differing)} of {len(found)} differ")
    return int(bool(differing))


if __name__ == "__main__":
    sys.exit(main())
