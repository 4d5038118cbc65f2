"""Worker processes: what is written, printed and drawn in them, what they hold open, and how they end."""

from __future__ import annotations

import gc
import os
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.engines.base import Odd, data
from helpers.modules import quiet_trainer
from pytorch_lightning.loggers import CSVLogger
from torch import Tensor, nn
from torch.utils.data import Dataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg
from lightning_fed.callbacks import TheoryMeter
from lightning_fed.lightning import SIGTERMException


def fit(kind: Any, *callbacks: pl.Callback, **kwargs: Any) -> tuple[Tensor, dict[str, float]]:
    """The server's model, and what was logged but for times."""
    options = {"local_steps": 3, "seed": 3, "evaluate_every": 0, "figure": False, "engine": "sequential"}
    algorithm: Algorithm = kwargs.pop("algorithm", FedADMM(eta=0.5))
    trainer_options, own_data = kwargs.pop("trainer", {}), kwargs.pop("data", None) or data()
    server = FederatedServer(algorithm, **{**options, **kwargs})
    trainer = quiet_trainer(server, 2, callbacks=list(callbacks), **trainer_options)
    trainer.fit(kind(), datamodule=own_data)
    assert server.federation is not None
    logged = {name: float(value) for name, value in trainer.callback_metrics.items() if name != "federated/seconds"}
    return server.federation.server.x_bar, logged


def assert_same(expected: tuple[Tensor, dict[str, float]], found: tuple[Tensor, dict[str, float]]) -> None:
    assert torch.allclose(found[0], expected[0], rtol=0, atol=1e-10)
    assert found[1] == pytest.approx(expected[1], rel=1e-6)


class WritesToTheLogger(Odd):
    def note(self, loss: Tensor, x: Tensor, y: Tensor, batch_idx: int) -> None:
        assert self.logger is not None
        self.logger.log_metrics({"direct": float(loss)})


def test_workers_lose_nothing_that_is_written_to_a_logger(tmp_path: Path) -> None:
    def rows(name: str, **kwargs: Any) -> int:
        fit(WritesToTheLogger, trainer={"logger": CSVLogger(tmp_path, name)}, **kwargs)
        return len((tmp_path / name / "version_0" / "metrics.csv").read_text().splitlines())

    expected = rows("alone")
    with pytest.warns(UserWarning, match="the logger"):
        assert rows("workers", workers=2) == expected


class Prints(Odd):
    def note(self, *_: Any) -> None:
        print("stepped")


def test_what_workers_print_is_printed_once(capfd: pytest.CaptureFixture[str]) -> None:
    fit(Prints, workers=2)
    assert capfd.readouterr().out.count("stepped") == 4 * 3 * 2


def test_workers_hold_few_files_open() -> None:
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 300, before[1]))
    try:
        fit(Odd, workers=2, data=data(310), local_steps=1)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, before)


class Slow(Odd):
    def note(self, *_: Any) -> None:
        time.sleep(0.3)


def test_a_signal_ends_a_round_of_workers_and_leaves_no_process(forked: list[int]) -> None:
    server = FederatedServer(FedADMM(), workers=2, engine="sequential", local_steps=5, evaluate_every=0)
    timer = threading.Timer(1.0, lambda: os.kill(os.getpid(), signal.SIGTERM))
    timer.start()
    with pytest.raises(SIGTERMException):
        quiet_trainer(server, 1).fit(Slow(), datamodule=data())
    assert server.rounds_done == 0
    assert forked
    for pid in forked:
        with pytest.raises(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


SLEEPING = """
import sys, time
from helpers.engines.base import Odd, data
from helpers.modules import quiet_trainer
from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.engines import orphans
if sys.argv[1] == "other systems":
    orphans._prctl = lambda: None

class Sleeps(Odd):
    def note(self, *_):
        print("asked", flush=True)
        time.sleep(60)

server = FederatedServer(FedADMM(), workers=2, engine="sequential", local_steps=1, evaluate_every=0, figure=False)
quiet_trainer(server, 1).fit(Sleeps(), datamodule=data())
"""


@pytest.mark.parametrize("system", ["linux", "other systems"])
def test_workers_end_with_a_parent_that_is_killed(system: str) -> None:
    path = os.pathsep.join([str(Path(__file__).parents[1]), os.environ.get("PYTHONPATH", "")])
    parent = subprocess.Popen(
        [sys.executable, "-c", SLEEPING, system],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        env={**os.environ, "PYTHONPATH": path},
    )
    assert parent.stdout is not None
    with parent.stdout as lines:
        assert [lines.readline(), lines.readline()] == [b"asked\n"] * 2
        children = Path(f"/proc/{parent.pid}/task/{parent.pid}/children").read_text().split()
        assert len(children) == 2
        parent.kill()
        parent.wait()
        deadline = time.monotonic() + 2
        while any(map(_lives, children)) and time.monotonic() < deadline:
            time.sleep(0.02)
    assert [pid for pid in children if _lives(pid)] == []


def _lives(pid: str) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in ("Z", "X")
    except (FileNotFoundError, ProcessLookupError):
        return False


class Augmented(Dataset[tuple[Tensor, Tensor]]):
    noise = np.random.default_rng(0)

    def __init__(self, plain: Dataset[Any]) -> None:
        self.plain: Any = plain

    def __len__(self) -> int:
        return len(self.plain)

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        x, y = self.plain[i]
        return x + torch.as_tensor(self.noise.normal(size=x.shape)), y


@pytest.mark.filterwarnings("ignore:The data of client 'c0' draw from a random generator of their own")
def test_what_data_draw_by_themselves_passes_from_client_to_client() -> None:
    def own() -> FederatedDataModule:
        Augmented.noise = np.random.default_rng(0)
        clients = data().splits["train"].items()
        return FederatedDataModule({cid: Augmented(plain) for cid, plain in clients}, batch_size=4)

    expected = fit(Odd, data=own())
    with pytest.warns(UserWarning, match="a random generator of the data"):
        assert_same(expected, fit(Odd, data=own(), workers=2))


@pytest.mark.filterwarnings("ignore")  # of the meter, about the bounds
@pytest.mark.parametrize("options", [{}, {"local_tolerance": 0.05, "local_steps": None, "local_epochs": 2}])
def test_workers_tell_how_exact_answers_are(options: dict[str, Any]) -> None:
    expected = fit(Odd, TheoryMeter(every=1), **options)
    assert "theory/residual_max" in expected[1]
    assert_same(expected, fit(Odd, TheoryMeter(every=1), workers=2, **options))


class Normalised(Odd):
    def build(self) -> None:
        self.norm = nn.BatchNorm1d(3)

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(super().forward(x))


def test_buffers_of_clients_do_not_keep_what_came_with_them() -> None:
    kept = fit(Normalised, workers=2, buffers="local", algorithm=FedAvg(), local_steps=1)
    gc.collect()
    assert kept
    assert "memfd:lightning_fed" not in Path("/proc/self/maps").read_text()
