"""Fits in forked children that a signal ends, at a durability point or from outside, and that go on from ``last``."""

from __future__ import annotations

import os
import signal
import tempfile
import traceback
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytorch_lightning as pl
import torch
from pytorch_lightning.callbacks import ModelCheckpoint

from helpers.modules import Net, classification, quiet_trainer
from lightning_fed import FederatedServer
from lightning_fed.algorithms import (
    Compressed,
    FedADMM,
    FedAvg,
    FedDR,
    FedDRII,
    FedDyn,
    FedLin,
    FedPD,
    FedSplit,
    Scaffold,
)
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.core.memory import tensors_of
from lightning_fed.store import durable
from lightning_fed.transforms import TopK

#: Every algorithm whose clients remember something.
STATEFUL = {
    "FedADMM": FedADMM(eta=0.5),
    "FedDR": FedDR(eta_hat=2.0),
    "FedDRII": FedDRII(eta_hat=2.0),
    "FedDRII, upload first": FedDRII(eta_hat=2.0, mode="upload_first"),
    "FedPD": FedPD(skip=0.3),
    "FedDyn": FedDyn(alpha=0.5),
    "FedSplit": FedSplit(),
    "Scaffold": Scaffold(),
    "FedLin": FedLin(client_k=5, server_k=5),
    "Compressed": Compressed(FedADMM(eta=0.5), TopK(5)),
    "Compressed, with feedback": Compressed(FedAvg(), TopK(5), feedback=True),
}

Point = Callable[[str], None]


def known(server: FederatedServer) -> dict[str, Any]:
    """All that server and clients remember."""
    federation = server.federation
    assert federation is not None
    found: dict[str, Any] = {f"server.{k}": v for k, v in tensors_of(federation.server).items()}
    for cid in sorted(federation.store, key=str):
        memory = federation.store[cid]
        found |= {f"{cid}.{name}": value for name, value in tensors_of(memory.state).items()}
        found |= {f"{cid}.{name}": value for name, value in memory.buffers.items()}
        found |= {f"{cid}.visits": memory.visits, f"{cid}.cost": memory.cost}
    return found


def differences(one: dict[str, Any], other: dict[str, Any]) -> list[str]:
    """Names of what is not the same to the last bit."""
    found = sorted(one.keys() ^ other.keys())
    for name in one.keys() & other.keys():
        a, b = one[name], other[name]
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b):
            found.append(name)
    return found


class Rounds(FederatedCallback):
    """Notes the rounds that have begun in a file, one byte each: what is written outlives a kill."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_round_start(self, trainer: pl.Trainer, pl_module: pl.LightningModule, round: int, cohort: Any) -> None:
        with self.path.open("ab") as file:
            file.write(bytes([round]))


@dataclass(frozen=True)
class Run:
    """One fit with a checkpoint after every round; ``root`` is its folder."""

    root: Path
    algorithm: Any = field(default_factory=lambda: STATEFUL["FedADMM"])
    store: str = "disk"
    rounds: int = 3
    module: type[pl.LightningModule] = Net
    save: dict[str, Any] = field(default_factory=dict)
    settings: dict[str, Any] = field(default_factory=dict)

    def fit(self) -> None:
        """Fit in this process, from the last checkpoint if there is one; note the outcome."""
        cohort = None if self.algorithm.traits.everybody else 2
        how = {"clients_per_round": cohort, "local_steps": 2, "evaluate_every": 0, "figure": False, "seed": 1}
        server = FederatedServer(self.algorithm, store=self.store, **{**how, **self.settings})  # type: ignore[arg-type]
        save = ModelCheckpoint(self.root / "saved", **{"save_last": True, **self.save})
        more: dict[str, Any] = {"enable_checkpointing": True, "default_root_dir": self.root}
        trainer = quiet_trainer(server, self.rounds, callbacks=[save, Rounds(self.root / "begun")], **more)
        trainer.fit(self.module(), datamodule=classification(clients=4), ckpt_path="last")
        torch.save(known(server), self.root / "final.pt")

    def start(self, point: Point | None = None, temporary: Path | None = None) -> int:
        """Fit in a child, which calls ``point`` at every durability point; return its process id."""
        self.root.mkdir(parents=True, exist_ok=True)
        pid = os.fork()
        if pid == 0:
            status = 70
            try:
                status = self._in_child(point, temporary)
            finally:
                os._exit(status)
        return pid

    def _in_child(self, point: Point | None, temporary: Path | None) -> int:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        warnings.simplefilter("ignore")
        warnings.filterwarnings("error", message=".*is damaged")  # a kill must not make the fit fall back
        if temporary is not None:
            os.environ["TMPDIR"] = str(temporary)
            tempfile.tempdir = None
        if point is not None:
            durable.point = point
        try:
            self.fit()
        except SystemExit as error:  # the status that Python gives a process that ends with this error
            return error.code if isinstance(error.code, int) else int(error.code is not None)
        except BaseException:
            (self.root / "error").write_text(traceback.format_exc())
            return 70
        return 0

    def play(self, point: Point | None = None) -> int:
        """Fit in a child; return its exit status, or the negative number of the signal that ended it."""
        return self.wait(self.start(point))

    def wait(self, pid: int) -> int:
        status = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if status == 70:
            raise AssertionError(
                (self.root / "error").read_text() if (self.root / "error").exists() else "the fit failed"
            )
        return status

    @property
    def begun(self) -> list[int]:
        """The rounds that have begun, also those of children that were killed."""
        path = self.root / "begun"
        return list(path.read_bytes()) if path.exists() else []

    @property
    def repeated(self) -> int:
        """The most rounds that were lost by one kill: begun, and begun anew after it."""
        begun = self.begun
        return max((before - after + 1 for before, after in pairwise(begun)), default=0)

    @property
    def final(self) -> dict[str, Any]:
        """What server and clients remember at the end."""
        return dict(torch.load(self.root / "final.pt", weights_only=False))


class At:
    """Sends a signal to the own process at its ``at``-th durability point."""

    def __init__(self, at: int, sign: int = signal.SIGKILL) -> None:
        self.left, self.sign = at, sign

    def __call__(self, name: str) -> None:
        self.left -= 1
        if self.left == 0:
            os.kill(os.getpid(), self.sign)


class Noted:
    """Appends the name of every durability point to a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __call__(self, name: str) -> None:
        with self.path.open("a") as file:
            file.write(f"{name}\n")
