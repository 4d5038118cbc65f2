"""Whole federations on loopback, each in a folder of its own, on free ports, ended by the test."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers import pass_through
from helpers.processes import processes_of

from lightning_fed.cli.deploying.build import server_of
from lightning_fed.cli.deploying.local import make_local
from lightning_fed.cli.main import build
from lightning_fed.deploy import proxy
from lightning_fed.deploy.hosting import NodeHost, ServerHost
from lightning_fed.deploy.journalling import digest_of_tensor
from lightning_fed.deploy.places import ServerPlace
from lightning_fed.deploy.supervisor import Supervisor
from lightning_fed.trainer.hooks import FederatedCallback

#: Has every Python process of a federation write down where it connects to, and which names it looks up.
AUDIT = """
import os, sys
def _note(event, args):
    if event in ("socket.connect", "socket.getaddrinfo", "socket.sendto"):
        where = args[0] if event == "socket.getaddrinfo" else args[1]
        with open(os.environ["AUDIT_FILE"], "a") as file:
            file.write(f"{event} {where!r}\\n")
sys.addaudithook(_note)
"""
#: A model whose steps take as long as a file says.
SLOW = """
import os, time
from lightning_fed.models import MLP

class SlowMLP(MLP):
    def training_step(self, batch, batch_idx):
        if os.path.exists(os.environ["SLOW_FILE"]):
            time.sleep(0.3)
        return super().training_step(batch, batch_idx)
"""
CONFIG = """
seed_everything: 0
trainer: {{max_epochs: {rounds}, accelerator: cpu, enable_model_summary: false,
  enable_progress_bar: false, enable_checkpointing: false, default_root_dir: {folder}/run,
  logger: {{class_path: lightning_fed.tracking.AutoWandbLogger, init_args: {{save_dir: {folder}/run}}}}}}
model: {{class_path: {model}, init_args: {{sizes: [60, 16, 10], lr: 0.05}}}}
data: {{class_path: lightning_fed.datamodules.Synthetic, init_args: {{clients: 6, batch_size: 2}}}}
federated:
  algorithm: {{class_path: lightning_fed.algorithms.{algorithm}}}
  clients_per_round: 4
  local_steps: 4
  engine: sequential
  evaluate_every: 0
  figure: false
"""


class Digests(FederatedCallback):
    """The bits of x_bar after every round of a simulation."""

    def __init__(self) -> None:
        self.found: list[str] = []

    def on_round_end(self, trainer: Any, module: Any, report: Any) -> None:
        federation = server_of(trainer).federation
        assert federation is not None
        self.found.append(digest_of_tensor(federation.server.x_bar))


class Federation:
    """A federation that a test drives step by step."""

    def __init__(self, folder: Path, algorithm: str, rounds: int, nodes: int, model: str, timeout: float) -> None:
        self.folder, self.config = folder, folder / "config.yaml"
        self.config.write_text(CONFIG.format(folder=folder, algorithm=algorithm, rounds=rounds, model=model))
        self.args = ["--config", str(self.config)]
        self.server, self.nodes = make_local(folder / "fed", self.args, nodes, ["loss"], timeout, 240.0)
        self.supervisor = Supervisor(folder / "logs")
        self.host: ServerHost | None = None
        self.entries: list[dict[str, Any]] = []

    def simulated(self) -> list[str]:
        """Digests of the simulation of the same config."""
        cli = build([*self.args, "--trainer.logger=false"], run=False)
        digests = Digests()
        cli.trainer.callbacks.append(digests)
        cli.trainer.fit(cli.model, datamodule=cli.datamodule)
        return digests.found

    def up(self) -> None:
        for place in self.nodes:
            NodeHost(place, self.supervisor, f"{place.folder.name}-")
        self.host = ServerHost(self.server, self.supervisor)
        self.host.up()

    def tick(self) -> None:
        assert self.host is not None
        self.entries += self.host.tick()

    def until(self, happened: Callable[[], Any], seconds: float = 180.0) -> Any:
        end = time.monotonic() + seconds
        while not (found := happened()):
            assert time.monotonic() < end, f"nothing happened in {seconds} s; {self.entries[-3:]}"
            self.tick()
            assert not [e for e in self.entries if e["event"] == "error"], self.entries[-1]
            time.sleep(0.02)
        return found

    @property
    def digests(self) -> list[str]:
        return [entry["x_bar"] for entry in self.entries if entry["event"] == "round"]

    def has_ended(self) -> bool:
        return any(entry["event"] == "end" for entry in self.entries)


@pytest.fixture
def nginx() -> None:
    """Skip tests of the proxy itself, and of commands that start it, where it is not installed."""
    if proxy.executable() is None:
        pytest.skip("nginx is not installed: apt-get install nginx-light")


def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where nginx is not installed, have federations of this process started with a pass-through in its place."""
    monkeypatch.setattr(proxy, "executable", lambda: sys.executable)
    script = str(Path(pass_through.__file__).absolute())
    monkeypatch.setattr(ServerPlace, "proxy", lambda self: [sys.executable, script, self.listen, str(self.port)])


@pytest.fixture
def federation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Federation]]:
    """Make federations; all their processes are ended with the test."""
    pytest.importorskip("flwr", reason="flwr is not installed: it needs Python 3.11")
    if proxy.executable() is None:
        stand_in(monkeypatch)
    made: list[Federation] = []
    site = tmp_path / "site"
    site.mkdir()
    (site / "sitecustomize.py").write_text(AUDIT)
    (tmp_path / "slow_model.py").write_text(SLOW)
    monkeypatch.setenv("AUDIT_FILE", str(tmp_path / "audit.txt"))
    monkeypatch.setenv("SLOW_FILE", str(tmp_path / "slow"))
    monkeypatch.setenv("PYTHONPATH", f"{site}{os.pathsep}{tmp_path}")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # LightningCLI calls add_instantiator
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("sys.argv", ["pytest"])

    def make(
        algorithm: str = "FedADMM",
        rounds: int = 3,
        nodes: int = 2,
        model: str = "lightning_fed.models.MLP",
        timeout: float = 60.0,
    ) -> Federation:
        made.append(Federation(tmp_path, algorithm, rounds, nodes, model, timeout))
        return made[-1]

    yield make
    for each in made:
        each.supervisor.close()
    end = time.monotonic() + 30
    while (left := processes_of(tmp_path / "fed")) and time.monotonic() < end:
        time.sleep(0.1)
    assert left == []
