"""Personal parts: trained with the rest, kept by their clients, never sent; in every engine, store and algorithm."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from helpers.offsets import COHORT, ROUNDS, SEED, STEPS, Offsets, Reference, offsets, slopes
from helpers.problems import ALGORITHMS, name_of
from helpers.reuse import assert_same
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedAvg, FedLin, FedPAQ, FedProx
from lightning_fed.callbacks import ClientEvaluation, FederatedCallback, TheoryMeter
from lightning_fed.core.memory import tensors_of
from lightning_fed.lightning.package import TRAINER
from lightning_fed.theory import Relative
from lightning_fed.transforms import TopK

KINDS: dict[str, tuple[Algorithm, float | None]] = {
    "FedAvg": (FedAvg(weights="uniform"), None),
    "FedADMM": (FedADMM(eta=2.0), 2.0),
}
ENGINES: dict[str, dict[str, Any]] = {
    "one by one": {"engine": "sequential"},
    "auto": {"engine": "auto"},
    "workers": {"workers": 2},
    "disk": {"store": "disk"},
}


class Listener(pl.Callback):
    """Has every local step made by Lightning's own loop."""

    def on_after_backward(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        pass


def run(
    algorithm: Algorithm, folder: Path, callbacks: list[pl.Callback] | None = None, **kwargs: Any
) -> FederatedServer:
    """The server after a fit of offsets."""
    settings = {"sampler": COHORT, "local_steps": STEPS, "evaluate_every": 0, "seed": SEED, "personal": "head.*"}
    server = FederatedServer(algorithm, **{**settings, **kwargs})
    trainer = quiet_trainer(server, ROUNDS, callbacks=callbacks or [], default_root_dir=folder)
    trainer.fit(Offsets(), datamodule=offsets())
    assert trainer.lightning_module.head["b"].item() == 0.25  # the first model's
    return server


def parts(server: FederatedServer) -> dict[Any, dict[str, Tensor]]:
    assert server.federation is not None
    return {cid: server.federation.part_of(cid) for cid in server.federation.client_ids}


@pytest.mark.parametrize("kind", KINDS)
def test_a_fit_is_joint_local_descent_that_shares_only_w(kind: str, tmp_path: Path) -> None:
    algorithm, eta = KINDS[kind]
    expected = Reference(eta).run(offsets())
    ways = {name: run(algorithm, tmp_path, **kwargs) for name, kwargs in ENGINES.items()}
    ways["lightning"] = run(algorithm, tmp_path, [Listener()], engine="sequential")
    for server in ways.values():
        assert server.federation is not None
        torch.testing.assert_close(server.federation.server.x_bar, expected.w, rtol=0, atol=1e-12)
        assert server.federation.layout.names == ("w",)
        for cid, part in parts(server).items():
            torch.testing.assert_close(part["head.b"], expected.b[cid], rtol=0, atol=1e-12)
        if eta is not None:
            for cid in server.federation.store:
                torch.testing.assert_close(server.federation.store[cid].state.z_i, expected.z[cid], rtol=0, atol=1e-12)
    seen = {cid for cid, b in expected.b.items() if b != 0.25}
    assert len(seen) >= 2
    for name in ("workers", "disk", "auto"):
        assert_same(everything(ways[name]), everything(ways["one by one"]))


def everything(server: FederatedServer) -> dict[Any, Tensor]:
    """The server's state, every client's, and the personal parts."""
    federation = server.federation
    assert federation is not None
    known = {("server", ""): tensors_of(federation.server)}
    known |= {("state", cid): tensors_of(federation.store[cid].state) for cid in federation.store}
    known |= {("part", cid): part for cid, part in parts(server).items()}
    return {(*key, name): value for key, tensors in known.items() for name, value in tensors.items()}


def test_a_stack_declines_and_says_why(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Stackable(Offsets):
        stackable = True

    server = FederatedServer(FedAvg(), local_steps=2, evaluate_every=0, personal="head.*")
    with caplog.at_level("INFO", TRAINER):
        quiet_trainer(server, 1).fit(Stackable(), datamodule=offsets(batch_size=6))
    said = " ".join(caplog.messages)
    assert "Clients are trained one by one: clients keep personal parts (head.b)." in said
    assert "Personal parameters: 1 (1 numbers), personal buffers: 0." in said
    assert "saves 8 of 32 bytes of each model that is sent: head.b." in said
    trainer = quiet_trainer(FederatedServer(FedAvg(), engine="vectorized", evaluate_every=0, personal="head.*"), 1)
    with pytest.raises(ValueError, match=r"vectorized.*personal parts"):
        trainer.fit(Stackable(), datamodule=offsets())


# -- every algorithm -----------------------------------------------------------------------------------------------


class Poison(FederatedCallback):
    """Makes one client's personal part huge at the end of its local work, which must reach nobody else."""

    def on_client_step(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        if visit.client == "c1" and visit.step == visit.planned:
            with torch.no_grad():
                module.net[4].weight.fill_(1e30)


def fit(algorithm: Algorithm, rounds: int, folder: Path, *callbacks: pl.Callback, resume: bool = False) -> Any:
    everybody = algorithm.traits.everybody
    server = FederatedServer(
        algorithm,
        clients_per_round=None if everybody else 3,
        local_steps=2,
        evaluate_every=0,
        seed=2,
        personal=["net.4.*"],
    )
    saved = ModelCheckpoint(folder, save_last=True)
    trainer = quiet_trainer(server, rounds, callbacks=[*callbacks, saved], enable_checkpointing=True)
    module = Net(lr=0.02)
    first = nn.Linear(8, 3).requires_grad_(False)
    first.load_state_dict(module.net[4].state_dict())
    trainer.fit(module, datamodule=classification(), ckpt_path=str(folder / "last.ckpt") if resume else None)
    stored = torch.load(folder / "last.ckpt", weights_only=True)["state_dict"]
    for shown in (module.net[4].weight, stored["net.4.weight"]):  # never a client's
        assert torch.equal(shown, first.weight)
    return server


EVERY = [*ALGORITHMS, FedPAQ(), Compressed(FedADMM(), TopK(10)), Compressed(FedAvg(), TopK(10), feedback=True)]


@pytest.mark.parametrize("algorithm", EVERY, ids=lambda algorithm: name_of(algorithm))
def test_parts_resume_bitwise_and_never_reach_the_server(algorithm: Algorithm, tmp_path: Path) -> None:
    whole = everything(fit(algorithm, 3, tmp_path / "whole"))
    fit(algorithm, 2, tmp_path / "half")
    resumed = everything(fit(algorithm, 3, tmp_path / "half", Poison(), resume=True))
    bad = ("part", "c1", "net.4.weight")
    assert (resumed.pop(bad) == 1e30).all()
    assert whole.pop(bad).abs().max() < 10
    if isinstance(algorithm, FedLin):  # whose clients send their gradients after the visit, each at its own part
        for key in [key for key in whole if key[1] in ("", "c1") and key[2] in ("g_bar", "e", "grad_i", "rho_i")]:
            del resumed[key], whole[key]
    assert_same(resumed, whole)
    own = [value for (kind, _, name), value in whole.items() if kind == "part" and name == "net.4.bias"]
    assert len({float(value[0]) for value in own}) >= 3  # clients differ


# -- gradients -----------------------------------------------------------------------------------------------------


class Certificates(FederatedCallback):
    """Compares a visit's certificate with the gradient by w at the client's w and b, as the module holds them."""

    def __init__(self) -> None:
        self.pairs: list[tuple[float, float]] = []

    def on_client_end(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any, reply: Any) -> None:
        of_w, _ = slopes(trainer.datamodule, visit.client, reply.x_i, module.head["b"].detach())
        found = visit.question.gradient(reply.x_i, of_w).norm()
        self.pairs.append((float(found), visit.certificate.residual))


@pytest.mark.parametrize("workers", [1, 2])
def test_certificates_are_about_w_at_the_clients_own_part(workers: int, tmp_path: Path) -> None:
    seen = Certificates()
    run(FedADMM(eta=2.0), tmp_path, [seen], local_tolerance=Relative(0.5), local_steps=60, workers=workers)
    assert len(seen.pairs) == 2 * ROUNDS
    for found, measured in seen.pairs:
        assert measured == pytest.approx(found, abs=1e-12)


class Measured(FederatedCallback):
    def __init__(self) -> None:
        self.logged: dict[str, float] = {}

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logged = {name: float(value) for name, value in trainer.callback_metrics.items()}


def test_objective_and_stationarity_take_each_clients_part(tmp_path: Path) -> None:
    found, evaluation = Measured(), ClientEvaluation(gradient_mapping=True)
    meter = TheoryMeter(every=1, clients=5, iterations=200)
    with pytest.warns(UserWarning, match="below the theorem's bound"):
        server = run(FedADMM(eta=2.0), tmp_path, [evaluation, meter, found], evaluate_every=1)
    data, federation = offsets(), server.federation
    assert federation is not None
    x_bar, own, losses, total = federation.server.x_bar, parts(server), [], torch.zeros(3, dtype=torch.float64)
    for cid in data.client_ids:
        x, y = data.client_dataset(cid).tensors
        b = own[cid]["head.b"]
        losses.append(0.5 * (x @ x_bar + b - y).square().mean())
        total += slopes(data, cid, x_bar, b)[0] / len(own)
    assert found.logged["federated/objective"] == pytest.approx(float(sum(losses) / len(losses)), rel=1e-12)
    assert found.logged["federated/gradient_mapping"] == pytest.approx(float(total.norm()), rel=1e-12)
    curvatures = [torch.linalg.eigvalsh(x.T @ x / len(x)).max() for x, _ in map(tensors, data.client_ids)]
    assert found.logged["theory/L"] == pytest.approx(float(max(curvatures)), rel=0.02)


def tensors(cid: Any) -> tuple[Tensor, Tensor]:
    x, y = offsets().client_dataset(cid).tensors
    return x, y


# -- steps in place ------------------------------------------------------------------------------------------------


class Large(pl.LightningModule):
    """Two layers whose weights are large enough for steps in place."""

    def __init__(self) -> None:
        super().__init__()
        g = torch.Generator().manual_seed(0)
        self.body, self.head = nn.Linear(512, 512, dtype=torch.float64), nn.Linear(512, 512, dtype=torch.float64)
        for p in self.parameters():
            p.data.copy_(torch.randn(p.shape, generator=g, dtype=torch.float64) / 20)

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x = batch[0].new_ones(1, 512) * batch[0].sum()
        return self.head(self.body(x).tanh()).square().mean()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def test_steps_in_place_pull_only_what_is_shared() -> None:
    found = []
    for callbacks in ([], [Listener()]):
        server = FederatedServer(FedProx(mu=0.5), local_steps=3, evaluate_every=0, personal="head.*")
        quiet_trainer(server, 2, callbacks=callbacks).fit(Large(), datamodule=offsets(2))
        assert server.federation is not None
        found.append((server.federation.server.x_bar, server.federation.part_of("c1")["head.weight"]))
    for fused, plain in zip(*found, strict=True):
        torch.testing.assert_close(fused, plain, rtol=0, atol=1e-12)
