"""Runs with personal parts: traffic, FedBN, evaluation, validation, failures, frozen layers, turnover, deployment."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from helpers.offsets import Offsets, offsets
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, Scaffold
from lightning_fed.callbacks import ClientEvaluation, Confusion, FederatedCallback, Sparsity
from lightning_fed.cli import main
from lightning_fed.engines import DivergenceError
from lightning_fed.evaluation.evaluate import evaluate_own, evaluate_splits
from lightning_fed.sampling import Sampler


@dataclass(frozen=True)
class Always(Sampler):
    """The same clients in every round."""

    positions: tuple[int, ...]

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        return list(self.positions)

    def inclusion_probabilities(self, n: int) -> Any:
        return np.ones(n)


def fit(
    module: pl.LightningModule | None = None, rounds: int = 2, data: Any = None, trainer: Any = None, **kwargs: Any
) -> FederatedServer:
    """The server after a fit with a personal last layer."""
    settings = {"local_steps": 2, "evaluate_every": 0, "seed": 1, "personal": "net.4.*"}
    server = FederatedServer(kwargs.pop("algorithm", FedAvg()), **{**settings, **kwargs})
    quiet_trainer(server, rounds, **(trainer or {})).fit(module or Net(), datamodule=data or classification())
    return server


# -- traffic and FedBN ---------------------------------------------------------------------------------------------

HEAD = 4 * (8 * 3 + 3)  # bytes of the last layer


@pytest.mark.parametrize(
    ("algorithm", "down", "up"), [(FedAvg(), 1, 1), (FedADMM(), 1, 1), (Scaffold(), 2, 2)], ids=["avg", "admm", "scaf"]
)
def test_bytes_shrink_by_the_personal_part_exactly(algorithm: Algorithm, down: int, up: int) -> None:
    with_part, without = fit(algorithm=algorithm).federation, fit(algorithm=algorithm, personal=None).federation
    assert with_part is not None
    assert without is not None
    visits = 2 * 4
    assert without.bytes_down - with_part.bytes_down == visits * down * HEAD
    assert without.bytes_up - with_part.bytes_up == visits * up * HEAD


class Norms(Net):
    def __init__(self) -> None:
        super().__init__(norm=True)


@pytest.mark.parametrize("buffers", ["average", "server"])
@pytest.mark.parametrize("workers", [1, 2])
def test_fedbn_keeps_weight_bias_and_statistics_of_a_norm(buffers: Any, workers: int) -> None:
    module = Norms()
    first = {name: value.clone() for name, value in module.state_dict().items() if name.startswith("net.1.")}
    server = fit(module, personal="net.1.*", buffers=buffers, workers=workers)
    federation = server.federation
    assert federation is not None
    assert federation.layout.names == ("net.0.weight", "net.0.bias", "net.4.weight", "net.4.bias")
    parts = [federation.part_of(cid) for cid in federation.client_ids]
    assert all(part.keys() == first.keys() for part in parts)
    assert all(int(part["net.1.num_batches_tracked"]) == 4 for part in parts)  # two visits of two steps
    for name, value in first.items():
        assert torch.equal(module.state_dict()[name], value)  # the server has none of it
        assert name.endswith("tracked") or len({tuple(part[name].tolist()) for part in parts}) == 4
    vector = 4 * (6 * 8 + 8 + 8 * 3 + 3)
    assert federation.bytes_up == federation.bytes_down == 2 * 4 * vector  # no buffers either


def test_other_buffers_are_averaged_as_ever() -> None:
    class Two(Norms):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("seen", torch.zeros(()))
            self.register_buffer("own", torch.zeros(()))

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            self.seen += len(batch[1])
            self.own += len(batch[1])
            return super().training_step(batch, batch_idx)

    module = Two()
    federation = fit(module, personal=["net.4.*", "own"], rounds=3).federation
    assert federation is not None
    assert float(module.seen) == 3 * 2 * 4  # rounds x steps x samples: every client goes on from the average
    assert float(module.own) == 0
    assert {float(federation.part_of(cid)["own"]) for cid in federation.client_ids} == {24.0}
    assert {*federation.store["c0"].buffers} == {"net.4.weight", "net.4.bias", "own"}
    assert federation.buffers.keys() == dict(module.named_buffers()).keys()


# -- evaluation ----------------------------------------------------------------------------------------------------


class Evaluated(FederatedCallback):
    """Evaluates before and after the round counts, and compares with each client's model, loaded by hand."""

    def __init__(self) -> None:
        self.before: Any = None
        self.rounds = 0

    def on_round_played(self, trainer: pl.Trainer, module: Any, round: int, federation: Any) -> None:
        self.before = evaluate_splits(trainer)

    def on_round_end(self, trainer: pl.Trainer, module: Any, report: Any) -> None:
        server = trainer.fit_loop.server
        found, own = evaluate_splits(trainer), evaluate_own(trainer, server.federation, "test")
        held = {name: value.clone() for name, value in module.state_dict().items()}
        for split in ("train", "test"):
            for cid, e in found[split].by_client.items():
                assert loss_at(server.personal_model(cid), trainer, split, cid) == pytest.approx(e.loss, rel=1e-5)
                assert self.before[split].by_client[cid] == e  # as the round is about to count
        for cid, e in own.items():
            alone = server.personal_model(cid, own=True)
            assert loss_at(alone, trainer, "test", cid) == pytest.approx(e.loss, rel=1e-5)
        assert all(torch.equal(value, held[name]) for name, value in module.state_dict().items())
        self.rounds += 1


def loss_at(state: dict[str, Tensor], trainer: pl.Trainer, split: str, cid: Any) -> float:
    model = type(trainer.lightning_module)()
    model.load_state_dict(state)
    batches = list(trainer.datamodule.client_eval_dataloader(cid, split))
    x, y = (torch.cat(column) for column in zip(*batches, strict=True))
    return float(cross_entropy(model.eval()(x), y).detach())


class Together(Net):
    """Clients of which are evaluated together."""

    stackable = loss_is_mean = True

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch, "val")


@pytest.mark.parametrize("kind", [Net, Norms, Together])
def test_clients_are_evaluated_with_their_own_parts(kind: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning_fed.evaluation import evaluate

    calls, original = [], evaluate.evaluate_together
    monkeypatch.setattr(evaluate, "evaluate_together", lambda *args: calls.append(1) or original(*args))
    seen = Evaluated()
    personal = ["net.4.*", "net.1.*"] if kind is Norms else "net.4.*"
    visited = tuple(range(17)) if kind is Together else (0, 2)
    kwargs: Any = {"algorithm": FedADMM(eta=1.0), "sampler": Always(visited), "personal": personal}
    fit(kind(), data=classification(clients=18), trainer={"callbacks": [seen]}, engine="sequential", **kwargs)
    assert seen.rounds == 2
    assert len(calls) == (2 * (4 + 1) if kind is Together else 0)  # two splits, before and after; own models


class Watch(pl.Callback):
    """Sees the first model's part in validation and between rounds."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_validation_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        self.seen.append(pl_module.net[4].weight.detach().clone())

    on_train_epoch_start = on_train_epoch_end = on_test_start = on_validation_start


def test_validation_test_and_loggers_see_what_they_should(tmp_path: Path) -> None:
    held_out = {cid: classification().client_dataset(cid) for cid in ("c0", "c3")}
    data = classification(val=held_out)
    module, watch, confusion = Net(), Watch(), Confusion()
    first = module.net[4].weight.detach().clone()
    evaluation = ClientEvaluation()
    server = FederatedServer(FedAvg(), local_steps=8, seed=1, personal="net.4.*")
    trainer = quiet_trainer(server, 6, callbacks=[watch, confusion, evaluation, Sparsity()])
    trainer.fit(module, datamodule=data)
    found = dict(trainer.callback_metrics)
    accuracy = float(found["federated/test_accuracy"])
    trainer.test(module, datamodule=data, verbose=False)
    assert len(watch.seen) >= 13
    assert all(torch.equal(value, first) for value in watch.seen)
    assert confusion.matrix is not None  # of the clients' models, not of the server's
    assert float(confusion.matrix.diagonal().sum() / confusion.matrix.sum()) == pytest.approx(accuracy, abs=1e-6)
    assert server.logged_settings(trainer)["federated"]["personal"] == ["net.4.*"]
    assert {name for name in found if name.startswith("sparsity/net.")} == {
        "sparsity/net.0.weight",
        "sparsity/net.0.weight/filters",
        "sparsity/net.0.bias",
    }


# -- failures, freezing, turnover ----------------------------------------------------------------------------------


class Fails(Net):
    """Fails in the second step of client c1's visits, once c1 has 10 samples of its own."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        visited = self.trainer.fit_loop.server.rounds_done
        if visited == 1 and batch_idx == 1 and self.failing:
            raise RuntimeError("no more data")
        return loss

    failing = False


class Fail(FederatedCallback):
    def on_client_start(self, trainer: pl.Trainer, module: Any, visit: Any) -> None:
        type(module).failing = visit.client == "c1"


@pytest.mark.filterwarnings("ignore:.*no more data")
def test_a_client_that_fails_keeps_the_part_that_it_had() -> None:
    parts = {}
    for rounds in (1, 2):
        server = fit(Fails(), rounds, on_client_error="skip", trainer={"callbacks": [Fail()]})
        assert server.federation is not None
        parts[rounds] = {cid: server.federation.part_of(cid)["net.4.weight"] for cid in server.federation.client_ids}
        assert server.federation.store["c1"].visits == 1
    for cid, value in parts[1].items():
        assert torch.equal(parts[2][cid], value) == (cid == "c1")


def test_a_part_that_is_not_finite_is_a_divergence() -> None:
    class Explodes(FederatedCallback):
        def on_client_step(self, trainer: pl.Trainer, module: Any, visit: Any) -> None:
            if visit.client == "c2" and visit.step == visit.planned:
                module.net[4].bias.data[0] = math.inf

    with pytest.raises(DivergenceError, match="client 'c2': training gave a model that is not finite"):
        fit(trainer={"callbacks": [Explodes()]})


class Thaw(pl.Callback):
    """Unfreezes the first layer before round 1, and the personal layer before round 2."""

    def on_train_epoch_start(self, trainer: pl.Trainer, pl_module: Any) -> None:
        pl_module.net[0].requires_grad_(trainer.current_epoch >= 1)
        pl_module.net[4].requires_grad_(trainer.current_epoch >= 2)


class Deep(Net):
    """With a layer that is always trained."""

    def __init__(self) -> None:
        super().__init__()
        self.net.insert(5, nn.Linear(3, 3))


def test_layers_thaw_during_the_fit(tmp_path: Path) -> None:
    found = {}
    for rounds in (1, 2, 3):
        module = Deep()
        first = {name: value.clone() for name, value in module.state_dict().items()}
        federation = fit(module, rounds, trainer={"callbacks": [Thaw()]}).federation
        assert federation is not None
        moved = {name for name, value in module.state_dict().items() if not torch.equal(value, first[name])}
        own = [not torch.equal(federation.part_of(cid)["net.4.weight"], first["net.4.weight"]) for cid in ("c0", "c3")]
        found[rounds] = (sorted({name[:5] for name in moved}), own, federation.layout.numel)
    last, body = 3 * 3 + 3, 6 * 8 + 8
    assert found[1] == (["net.5"], [False, False], last)
    assert found[2] == (["net.0", "net.5"], [False, False], last + body)
    assert found[3] == (["net.0", "net.5"], [True, True], last + body)  # personal: never part of the layout


def test_a_client_that_comes_back_has_its_part_still() -> None:
    class Turn(FederatedCallback):
        def on_round_end(self, trainer: pl.Trainer, module: Any, report: Any) -> None:
            server = trainer.fit_loop.server
            if report.round == 0:
                self.part = server.federation.part_of("c1")
                server.expel("c1")
            elif report.round == 1:
                server.admit("c1")
                assert torch.equal(server.federation.part_of("c1")["net.4.weight"], self.part["net.4.weight"])

    turn = Turn()
    server = fit(rounds=3, algorithm=FedADMM(eta=1.0), trainer={"callbacks": [turn]})
    assert server.federation is not None
    assert server.federation.store["c1"].visits == 2
    assert not torch.equal(server.federation.part_of("c1")["net.4.weight"], turn.part["net.4.weight"])


# -- deployment ----------------------------------------------------------------------------------------------------


def test_a_personal_model_is_the_servers_with_the_clients_part() -> None:
    module = Net()
    server = fit(module, algorithm=FedADMM(eta=1.0), sampler=Always((0, 2)))
    federation = server.federation
    assert federation is not None
    shared, first = module.state_dict(), Net().state_dict()
    for cid, visited in (("c0", True), ("c1", False)):
        state = server.personal_model(cid)
        assert torch.equal(state["net.0.weight"], shared["net.0.weight"])
        assert torch.equal(state["net.4.weight"], first["net.4.weight"]) != visited
        assert torch.equal(state["net.4.weight"], federation.part_of(cid)["net.4.weight"])
    own = server.personal_model("c0", own=True)
    x_i = federation.layout.split(federation.algorithm.local_model(federation.recall("c0")))
    assert torch.equal(own["net.0.weight"], x_i["net.0.weight"])
    own["net.4.weight"].zero_()  # a copy
    assert federation.part_of("c0")["net.4.weight"].any()
    with pytest.raises(ValueError, match="Client 'nobody' is not in the federation of 4 clients"):
        server.personal_model("nobody")
    with pytest.raises(ValueError, match="Clients of FedAvg keep no model of their own"):
        fit().personal_model("c0", own=True)
    with pytest.raises(ValueError, match="There is no federation yet"):
        FederatedServer(FedAvg(), personal="a").personal_model("c0")


def test_a_personal_model_can_be_read_from_a_checkpoint(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = []
    for resume in (None, str(tmp_path / "last.ckpt")):
        server = FederatedServer(FedADMM(), local_steps=2, evaluate_every=0, personal=["net.1.*", "net.4.*"])
        how: Any = {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}
        quiet_trainer(server, 2, **how).fit(Norms(), datamodule=classification(), ckpt_path=resume)
        found.append(server.personal_model("c2", own=True))
    assert all(torch.equal(value, found[1][name]) for name, value in found[0].items())
    assert not torch.equal(found[0]["net.4.weight"], Norms().net[4].weight)
    main(["checkpoint", "inspect", str(tmp_path / "last.ckpt")])
    assert "99, of which 56 trained, 43 personal" in capsys.readouterr().out


# -- refusals ------------------------------------------------------------------------------------------------------


def test_patterns_are_checked_before_the_first_round() -> None:
    with pytest.raises(ValueError, match=r"'head\.\*' matches no parameter or buffer of the module"):
        fit(personal="head.*")
    with pytest.raises(ValueError, match="matches every trainable parameter of Net"):
        fit(personal="net.*")


def test_a_checkpoint_of_other_personal_parts_is_refused_by_name(tmp_path: Path) -> None:
    saved = ModelCheckpoint(tmp_path, save_last=True)
    fit(Norms(), 1, trainer={"callbacks": [saved], "enable_checkpointing": True})
    trainer = quiet_trainer(
        FederatedServer(FedAvg(), local_steps=2, evaluate_every=0, seed=1),
        callbacks=[ModelCheckpoint(tmp_path, save_last=True)],
        enable_checkpointing=True,
    )
    with (
        pytest.warns(UserWarning, match=r"personal=None \(was \['net\.4\.\*'\]\)"),
        pytest.raises(ValueError, match=r"Parameter net\.4\.bias is personal in the checkpoint, but not here"),
    ):
        trainer.fit(Norms(), datamodule=classification(), ckpt_path=str(tmp_path / "last.ckpt"))


def test_a_part_changed_between_rounds_is_refused() -> None:
    class Meddles(pl.Callback):
        def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: Any) -> None:
            pl_module.net[4].bias.data.fill_(1.0)

    with pytest.raises(ValueError, match=r"net\.4\.bias was changed outside.*and the first model's personal part"):
        fit(trainer={"callbacks": [Meddles()]})


def test_a_part_changed_by_validation_is_the_first_models_again() -> None:
    class Careless(Net):
        def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
            self.net[4].bias.data += 1.0

    module, data = Careless(), classification(val={"c0": classification().client_dataset("c0")})
    with pytest.warns(UserWarning, match=r"Validation changed parameter net\.4\.bias"):
        fit(module, data=data, trainer={"num_sanity_val_steps": 0})
    assert torch.equal(module.net[4].bias, Net().net[4].bias)


def test_a_fit_without_parts_keeps_nothing() -> None:
    server = FederatedServer(FedAvg(weights="uniform"), local_steps=2, evaluate_every=0)
    quiet_trainer(server, 1).fit(Offsets(), datamodule=offsets())
    assert server.federation is not None
    assert server.federation.part_of("c0") == {}
    assert server.federation.store["c0"].buffers == {}
