"""The newer algorithms when runs are interrupted, batches have no loss, and modules have buffers."""

from __future__ import annotations

from dataclasses import astuple
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import (
    Algorithm,
    Compressed,
    FedADMM,
    FedAvg,
    FedAvgM,
    FedDRII,
    FedDualAvg,
    FedDyn,
    FedLin,
    FedMid,
    FedNova,
    FedPAQ,
    FedPD,
    FedPrimalDual,
    FedSplit,
    FedYogi,
    ParallelDRS,
    Scaffold,
)
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.core.memory import tensors_of
from lightning_fed.prox import L1
from lightning_fed.transforms import TopK

FAMILY = [
    ParallelDRS(alpha=1.5, weights="samples"),
    FedDRII(g=L1(1e-3)),
    FedDRII(mode="upload_first"),
    FedPD(),
    FedPD(skip=0.5, seed=1),
    FedPD(oracle="II", refresh_every=3),
    FedDyn(),
    FedSplit(s=0.5),
    Scaffold(1),
    Scaffold(2),
    FedLin(),
    FedLin(client_k=10, server_k=20),
    FedMid(g=L1(1e-3)),
    FedDualAvg(g=L1(1e-3)),
    FedPAQ(),
    FedADMM(eta="auto", mean="seen"),
    FedADMM(eta="auto", mean="active", g=L1(1e-3)),
    FedPrimalDual(weights="samples"),
    Compressed(FedPrimalDual(), TopK(10)),
    Scaffold(vectors=1),
    FedAvgM(),
    FedYogi(),
    FedNova(stragglers=0.5),
    Compressed(FedADMM(), TopK(10)),
    Compressed(FedAvg(), TopK(10), feedback=True),
]


class StopRun(Exception):  # noqa: N818
    """Whatever ends a run early."""


class StopInside(FederatedCallback):
    """Fails when the second client of round 2 is done: its state must not have been counted."""

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        if visit.round == 2 and visit.position == 1:
            raise StopRun


def run(algorithm: Algorithm, *callbacks: pl.Callback, ckpt_path: Any = None) -> dict[str, Tensor]:
    """All that must be equal in the end: model, buffers, server, every client, traffic."""
    cohort = None if algorithm.traits.everybody else 2
    server = FederatedServer(algorithm, clients_per_round=cohort, local_steps=2, seed=3, evaluate_every=0)
    saving = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    trainer = quiet_trainer(server, 4, callbacks=callbacks, enable_checkpointing=saving, limit_val_batches=0)
    module = Net(dropout=0.3, norm=True, scheduler="epoch")
    trainer.fit(module, datamodule=classification(drop_last=True), ckpt_path=ckpt_path)
    federation = server.federation
    assert federation is not None
    found = {f"model {name}": value for name, value in module.state_dict().items()}
    found |= {f"server {name}": value for name, value in vars(federation.server).items()}
    for cid in sorted(federation.store, key=str):
        found |= {f"{cid} {name}": value for name, value in tensors_of(federation.store[cid].state).items()}
        found[f"{cid} cost"] = torch.tensor(astuple(federation.store[cid].cost))
    found["cost"] = torch.tensor([*astuple(federation.cost), federation.rounds_done])
    return {name: value.clone() for name, value in found.items()}


@pytest.mark.parametrize("algorithm", FAMILY, ids=repr)
def test_resume_is_bitwise_with(algorithm: Algorithm, tmp_path: Path) -> None:
    with pytest.raises(StopRun):
        run(algorithm, ModelCheckpoint(tmp_path, save_last=True), StopInside())
    torch.load(tmp_path / "last.ckpt", weights_only=True)
    resumed = run(algorithm, ModelCheckpoint(tmp_path, save_last=True), ckpt_path="last")
    whole = run(algorithm)
    assert resumed.keys() == whole.keys()
    assert [name for name, value in resumed.items() if not torch.equal(value, whole[name])] == []
    if "server round" in whole:
        assert int(whole["server round"]) == 4


@pytest.mark.parametrize("algorithm", FAMILY, ids=repr)
def test_running_statistics_follow_the_clients_data(algorithm: Algorithm) -> None:
    before = dict(Net(norm=True).named_buffers())
    after = run(algorithm)
    moved = {name for name, value in before.items() if not torch.equal(after[f"model {name}"], value)}
    assert moved == before.keys()


class SometimesNone(Net):
    """Every other batch has no loss, and so makes no step."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx % 2 else loss


class NeverAny(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> None:
        return None


class Listener(pl.Callback):
    """Does nothing, but has to be called, so that steps are not lean."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


def state_after(algorithm: Algorithm, module: Net, *callbacks: pl.Callback) -> tuple[Any, dict[Any, Any]]:
    server = FederatedServer(algorithm, local_steps=2, evaluate_every=0)
    trainer = quiet_trainer(server, 1, callbacks=callbacks, limit_val_batches=0)
    trainer.fit(module, datamodule=classification(drop_last=True))
    assert server.federation is not None
    return server.federation.server, {cid: server.federation.store[cid].state for cid in server.federation.store}


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("callbacks", [(), (Listener(),)], ids=["lean", "hooked"])
def test_only_batches_that_make_a_step_count_for_its_length(callbacks: tuple[pl.Callback, ...]) -> None:
    server, clients = state_after(Scaffold(2), SometimesNone(lr=0.05), *callbacks)
    moved = [float(state.c_i.norm()) for state in clients.values()]
    avg, _ = state_after(FedAvg(weights="uniform"), SometimesNone(lr=0.05), *callbacks)
    x0 = torch.nn.utils.parameters_to_vector(Net().parameters()).detach()
    assert torch.allclose(server.x_bar, avg.x_bar, atol=1e-7)  # the first round is FedAvg
    assert torch.allclose(server.c.float(), (x0 - server.x_bar) / 0.05, atol=1e-5)  # one step each, not two
    assert min(moved) > 0
    elapsed = state_after(FedDualAvg(), SometimesNone(lr=0.05), *callbacks)[0].elapsed
    assert float(elapsed) == pytest.approx(0.05)


@pytest.mark.filterwarnings("ignore:`training_step` returned `None`")
@pytest.mark.parametrize("algorithm", [Scaffold(2), FedMid(g=L1(0.1)), FedDualAvg(g=L1(0.1))], ids=repr)
def test_a_visit_without_any_step_changes_nothing(algorithm: Algorithm) -> None:
    server, clients = state_after(algorithm, NeverAny())
    x0 = torch.nn.utils.parameters_to_vector(Net().parameters()).detach()
    assert torch.equal(server.x_bar, x0)
    for state in clients.values():
        assert all(torch.equal(value, torch.zeros_like(value)) for value in vars(state).values())
