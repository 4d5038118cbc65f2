"""Ctrl-C, SIGTERM and kill -9 in the middle of a round: the run goes on, bitwise, from its last checkpoint."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.lightning import SIGTERMException

TESTS = Path(__file__).parents[1]

SCRIPT = """
import os, signal, sys
sys.path.insert(0, {tests!r})
import torch, pytorch_lightning as pl
from pytorch_lightning.callbacks import ModelCheckpoint
from helpers.modules import Net, classification, quiet_trainer
from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM
from lightning_fed.callbacks import FederatedCallback

folder, sign = sys.argv[1], int(sys.argv[2])
torch.set_num_threads(1)
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored by whatever a shell runs in the background

class Kill(FederatedCallback):
    def on_client_start(self, trainer, module, visit):
        if sign and visit.round == 3 and visit.position == 1:
            os.kill(os.getpid(), sign)

server = FederatedServer(FedADMM(eta=1.0), clients_per_round=3, local_steps=5)
save = ModelCheckpoint(folder, save_last=True)
trainer = quiet_trainer(server, 5, callbacks=[save, Kill()], enable_checkpointing=True)
module = Net(optimizer="adam", dropout=0.3)
try:
    trainer.fit(module, datamodule=classification(), ckpt_path="last")
finally:
    held = server.federation.server.x_bar
    shown = torch.cat([p.detach().reshape(-1) for p in module.parameters()])
    assert torch.equal(held, shown), "the module does not hold the server's model"
torch.save({{"x_bar": held, "rounds": server.rounds_done}}, folder + "/final.pt")
"""


def run(folder: Path, sign: int) -> int:
    """Exit status of a run that sends itself a signal in round 3."""
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-c", SCRIPT.format(tests=str(TESTS)), str(folder), str(int(sign))]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=120, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert "does not hold" not in done.stderr, done.stderr
    return done.returncode


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> torch.Tensor:
    folder = tmp_path_factory.mktemp("whole")
    assert run(folder, 0) == 0
    final: torch.Tensor = torch.load(folder / "final.pt")["x_bar"]
    return final


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGKILL"])
def test_a_run_that_was_stopped_by_a_signal_goes_on_bitwise(name: str, whole: torch.Tensor, tmp_path: Path) -> None:
    status = run(tmp_path, getattr(signal, name))
    assert status == {"SIGINT": 1, "SIGTERM": 143, "SIGKILL": -9}[name]
    assert not (tmp_path / "final.pt").exists()
    assert torch.load(tmp_path / "last.ckpt", weights_only=True)["global_step"] == 3
    assert run(tmp_path, 0) == 0
    final = torch.load(tmp_path / "final.pt")
    assert final["rounds"] == 5
    assert torch.equal(final["x_bar"], whole)


# -- where SIGTERM finds a fit -------------------------------------------------------------------------------------


class Waits(pl.Callback):
    """Gets SIGTERM in a hook, in which it would go on for long."""

    def __init__(self, hook: str) -> None:
        self.went_on = False
        setattr(self, hook, self.wait)

    def wait(self, *_: Any) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        self.went_on = True


class Measured(Net):
    """Gets SIGTERM when its model is evaluated on a client."""

    went_on = False

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step:  # not in Lightning's sanity check
            os.kill(os.getpid(), signal.SIGTERM)
            self.went_on = True


def fit(module: Net, *callbacks: pl.Callback) -> None:
    server = FederatedServer(FedADMM(), clients_per_round=2, local_steps=2, figure=False)
    quiet_trainer(server, 2, callbacks=list(callbacks)).fit(module, datamodule=classification())


@pytest.fixture
def term() -> Iterator[Callable[[Any], None]]:
    """Set a handler of SIGTERM; the former one is restored after the test."""
    before = signal.getsignal(signal.SIGTERM)
    yield lambda handler: signal.signal(signal.SIGTERM, handler) and None
    signal.signal(signal.SIGTERM, before)


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_epoch_end", "on_train_end"])
def test_sigterm_ends_a_callback_at_once(hook: str, term: Any) -> None:
    term(signal.SIG_DFL)
    waits = Waits(hook)
    with pytest.raises(SIGTERMException) as stopped:
        fit(Net(), waits)
    assert stopped.value.code == 143
    assert not waits.went_on
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def test_sigterm_ends_an_evaluation_at_once(term: Any) -> None:
    term(signal.SIG_DFL)
    module = Measured()
    with pytest.raises(SIGTERMException) as stopped:
        fit(module)
    assert stopped.value.code == 143
    assert not module.went_on


@pytest.mark.parametrize("hook", ["on_train_start", "on_train_end"])
def test_a_handler_of_the_users_own_decides_and_the_fit_ends_by_lightnings_note(hook: str, term: Any) -> None:
    noted: list[int] = []
    term(lambda signum, frame: noted.append(signum))
    waits = Waits(hook)
    with pytest.raises(SIGTERMException) as stopped:  # after the next step, or when the fit is torn down
        fit(Net(), waits)
    assert noted == [signal.SIGTERM]
    assert waits.went_on
    assert stopped.value.code == 143
