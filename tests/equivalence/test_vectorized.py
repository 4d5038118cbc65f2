"""Clients trained side by side end where clients trained one by one end; what does not fit is trained one by one."""

from __future__ import annotations

import random
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from modules import Net, classification, quiet_trainer
from problems import every_algorithm
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import TensorDataset
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedPAQ, FedProx
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.engines import ClientError
from lightning_fed.local.stacked import Answers, Questions, StackedLocal
from lightning_fed.sampling import Bernoulli
from lightning_fed.transforms import TopK

TOLERANCE = 1e-10


class Smooth(Net):
    """In float64 throughout; logs a loss, a number and a metric."""

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.accuracy = MulticlassAccuracy(3, average="micro")
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.accuracy.update(logits, y)
        self.log("train_loss", loss, batch_size=len(y))
        self.log_dict({"confidence": logits.detach().softmax(1).amax(1).mean(), "two": 2.0}, batch_size=len(y))
        self.log("train_acc", self.accuracy, on_step=False, on_epoch=True, batch_size=len(y))
        return loss


def data(**kwargs: Any) -> FederatedDataModule:
    """Clients of 9, 10, 11, ... samples: batches of 4 leave short ones."""
    plain = classification(5, **kwargs)
    for split in plain.splits.values():
        for cid, dataset in split.items():
            assert isinstance(dataset, TensorDataset)
            x, y = dataset.tensors
            split[cid] = TensorDataset(x.double(), y)
    return plain


def fit(
    engine: Any,
    algorithm: Algorithm,
    module: pl.LightningModule,
    *,
    rounds: int = 3,
    trainer: Any = None,
    **kwargs: Any,
) -> tuple[FederatedServer, pl.Trainer]:
    options = {"local_steps": 7, "seed": 3, "evaluate_every": 0, **kwargs}
    server = FederatedServer(algorithm, engine=engine, **options)
    used = quiet_trainer(server, rounds, **(trainer or {}))
    used.fit(module, datamodule=data())
    return server, used


def memories(server: FederatedServer) -> dict[str, Tensor]:
    """Everything that server and clients remember, by name."""
    federation = server.federation
    assert federation is not None
    states = {"server": federation.server, **{cid: federation.store[cid].state for cid in federation.store}}
    return {f"{who}.{i}": leaf for who, state in states.items() for i, leaf in enumerate(pytree.tree_leaves(state))}


def assert_engines_agree(algorithm: Algorithm, tolerance: float = TOLERANCE, **kwargs: Any) -> None:
    model = kwargs.pop("model", {})
    one_by_one, first = fit("sequential", algorithm, Smooth(**model), **kwargs)
    stacked, second = fit("vectorized", algorithm, Smooth(**model), **kwargs)
    expected, found = memories(one_by_one), memories(stacked)
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=0, atol=tolerance), name
    timeless = {k: v for k, v in first.callback_metrics.items() if k != "federated/seconds"}
    assert {"train_loss", "train_acc", "confidence", "two"} <= timeless.keys()
    for name, value in timeless.items():
        assert float(second.callback_metrics[name]) == pytest.approx(float(value), abs=1e-6, rel=1e-6), name


@every_algorithm
def test_every_algorithm_gives_the_same_numbers(algorithm: Algorithm) -> None:
    everybody = algorithm.everybody
    assert_engines_agree(algorithm, clients_per_round=None if everybody else 3)


@pytest.mark.parametrize(
    "algorithm",
    [FedProx(mu=0.3, stragglers=0.7), Compressed(FedADMM(eta=1.0), TopK(20)), FedPAQ(levels=4)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_algorithms_with_draws_of_their_own_give_the_same_numbers(algorithm: Algorithm) -> None:
    assert_engines_agree(algorithm, clients_per_round=4)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1}])
def test_elementwise_optimisers_and_clipping_give_the_same_numbers(optimizer: str, clip: dict[str, Any]) -> None:
    assert_engines_agree(FedADMM(eta=0.5), model={"optimizer": optimizer}, trainer=clip, tolerance=1e-9)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_of_plain_steps_gives_the_same_numbers(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_engines_agree(FedADMM(eta=0.5), trainer=clip)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_clients_that_finish_early_wait_unchanged(optimizer: str) -> None:
    """Epochs of 3, 3, 3, 3 and 4 batches."""
    options = {"local_steps": None, "local_epochs": 2}
    assert_engines_agree(FedADMM(eta=0.5), model={"optimizer": optimizer}, tolerance=1e-9, **options)


def test_cohorts_of_any_size_and_a_learning_rate_that_changes_give_the_same_numbers() -> None:
    assert_engines_agree(FedADMM(eta=0.5), model={"scheduler": "epoch"}, sampler=Bernoulli(0.5), rounds=6)


def test_stacks_are_cut_into_pieces_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 2)
    monkeypatch.setattr("lightning_fed.local.plan.BLOCK_BYTES", 1000)
    assert_engines_agree(FedADMM(eta=0.5))


def test_frozen_parameters_are_shared_and_stay() -> None:
    class Frozen(Smooth):
        def configure_optimizers(self) -> Any:
            self.net[0].requires_grad_(False)
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    one_by_one, _ = fit("sequential", FedADMM(), Frozen())
    stacked, trainer = fit("vectorized", FedADMM(), Frozen())
    assert torch.allclose(one_by_one.federation.server.x_bar, stacked.federation.server.x_bar, rtol=0, atol=TOLERANCE)
    assert torch.equal(trainer.lightning_module.net[0].weight, Frozen().net[0].weight)


def test_compiled_steps_give_the_same_numbers() -> None:
    one_by_one, _ = fit("sequential", FedADMM(), Smooth())
    stacked, _ = fit("vectorized", FedADMM(), Smooth(), compile=True)
    expected, found = memories(one_by_one), memories(stacked)
    assert all(torch.allclose(found[name], expected[name], rtol=0, atol=TOLERANCE) for name in expected)


def test_a_compiler_that_fails_or_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one, _ = fit("sequential", FedADMM(), Smooth())

    def refuses(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    def errs(graph: Any, inputs: Any) -> Any:
        return lambda *args: [out + 1e-3 for out in graph(*args)]

    for compiler in (refuses, errs):
        monkeypatch.setattr("torch._inductor.compile", compiler)
        stacked, _ = fit("vectorized", FedADMM(), Smooth(), compile=True)
        x_bar = one_by_one.federation.server.x_bar
        assert torch.allclose(stacked.federation.server.x_bar, x_bar, rtol=0, atol=TOLERANCE)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Any) -> None:
    straight, _ = fit("vectorized", FedADMM(), Smooth(), rounds=4)

    def saving() -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}

    fit("vectorized", FedADMM(), Smooth(), rounds=2, trainer=saving())
    server = FederatedServer(FedADMM(), engine="vectorized", local_steps=7, seed=3, evaluate_every=0)
    quiet_trainer(server, 4, **saving()).fit(Smooth(), datamodule=data(), ckpt_path=tmp_path / "last.ckpt")
    expected, found = memories(straight), memories(server)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_value_that_changes_between_rounds_is_seen() -> None:
    class Scaled(Smooth):
        factor = 1.0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.factor * super().training_step(batch, batch_idx)

    class Changes(FederatedCallback):
        def on_round_start(self, trainer: Any, module: Any, round: int, cohort: Any) -> None:
            module.factor = 1.0 + round

    def run(engine: str) -> Tensor:
        server, _ = fit(engine, FedADMM(), Scaled(), trainer={"callbacks": [Changes()]})
        return server.federation.server.x_bar

    assert torch.allclose(run("vectorized"), run("sequential"), rtol=0, atol=TOLERANCE)


class NotAMean(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")


class LooksAtTheIndex(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss * 2 if batch_idx % 2 else loss


class LooksAtTheTrainer(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx) / (1 + self.current_epoch)


class Draws(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return super().training_step([batch[0] * (1 + 0.1 * random.random()), batch[1]], batch_idx)


class Counts(Smooth):
    count = 0

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.count += 1
        return super().training_step(batch, batch_idx)


class Branches(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        return loss if float(loss.detach()) > 1 else 2 * loss


class AsksTheMetric(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("now", self.accuracy(self(batch[0]), batch[1]))
        return super().training_step(batch, batch_idx)


class SumsUp(Smooth):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        self.log("samples", float(len(batch[1])), reduce_fx="sum")
        return super().training_step(batch, batch_idx)


class Hooked(Smooth):
    def on_train_batch_end(self, *_: Any) -> None:
        pass


REFUSED = {
    NotAMean: "not the mean over its samples",
    LooksAtTheIndex: "uses batch_idx",
    LooksAtTheTrainer: "looks at the trainer",
    Draws: "draws random numbers",
    Counts: "changes Counts.count",
    Branches: "does not work under torch.func",
    AsksTheMetric: "asks a metric for its value",
    SumsUp: "'samples'",
    Hooked: "overrides on_train_batch_end",
}


@pytest.mark.parametrize("kind", REFUSED, ids=lambda kind: kind.__name__)
def test_what_cannot_be_stacked_is_refused_by_name_and_trained_one_by_one_by_default(
    kind: type[Smooth], caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(ValueError, match=f'engine="vectorized" is impossible here: .*{REFUSED[kind]}'):
        fit("vectorized", FedADMM(), kind())
    server, _ = fit("auto", FedADMM(), kind())
    assert sum("Clients are trained one by one" in text and REFUSED[kind] in text for text in caplog.messages) == 1
    expected, _ = fit("sequential", FedADMM(), kind())
    assert torch.equal(server.federation.server.x_bar, expected.federation.server.x_bar)


@pytest.mark.parametrize(
    ("model", "reason"), [({"dropout": 0.3}, "torch.func"), ({"norm": True}, "torch.func|buffers")]
)
def test_layers_that_draw_or_remember_are_refused(model: dict[str, Any], reason: str) -> None:
    with pytest.raises(ValueError, match=reason):
        fit("vectorized", FedADMM(), Smooth(**model))


def test_hooks_optimisers_and_schedulers_that_need_single_steps_are_refused() -> None:
    class EveryStep(FederatedCallback):
        def on_client_step(self, *_: Any) -> None:
            pass

    with pytest.raises(ValueError, match="EveryStep has an on_client_step hook"):
        fit("vectorized", FedADMM(), Smooth(), trainer={"callbacks": [EveryStep()]})
    with pytest.raises(ValueError, match="scheduler steps with every batch"):
        fit("vectorized", FedADMM(), Smooth(scheduler="step"))

    class Factored(Smooth):
        def configure_optimizers(self) -> Any:
            return torch.optim.Adafactor(self.parameters())

    with pytest.raises(ValueError, match="Adafactor may mix the clients"):
        fit("vectorized", FedADMM(), Factored())


def test_auto_leaves_convolutions_and_large_models_one_by_one(caplog: pytest.LogCaptureFixture) -> None:
    class Convolves(Smooth):
        def __init__(self) -> None:
            super().__init__()
            self.conv = nn.Conv1d(1, 1, 3, padding=1).double()

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(self.conv(x.unsqueeze(1)).squeeze(1))

    fit("auto", FedADMM(), Convolves(), rounds=1)
    assert any("convolutions" in text for text in caplog.messages)
    found = fit("vectorized", FedADMM(), Convolves(), rounds=1)[0].federation.server.x_bar
    expected = fit("sequential", FedADMM(), Convolves(), rounds=1)[0].federation.server.x_bar
    assert torch.allclose(found, expected, rtol=0, atol=TOLERANCE)


def test_a_client_whose_data_are_bad_is_named() -> None:
    bad = data()
    x, y = bad.splits["train"]["c3"].tensors
    bad.splits["train"]["c3"] = TensorDataset(x, torch.full_like(y, 99))
    server = FederatedServer(FedADMM(), engine="vectorized", local_steps=3, evaluate_every=0)
    with pytest.raises(ClientError, match="round 0, client 'c3'"):
        quiet_trainer(server, 1).fit(Smooth(), datamodule=bad)


def test_a_client_that_diverges_is_named() -> None:
    bad = data()
    x, y = bad.splits["train"]["c3"].tensors
    bad.splits["train"]["c3"] = TensorDataset(x * float("inf"), y)
    server = FederatedServer(FedADMM(), engine="vectorized", local_steps=3, evaluate_every=0)
    with pytest.raises(ClientError, match="round 0, client 'c3'"):
        quiet_trainer(server, 1).fit(Smooth(), datamodule=bad)


@pytest.mark.parametrize(("name", "value"), [("engine", "fast"), ("compile", "yes"), ("compile", 1)])
def test_unknown_settings_are_refused(name: str, value: Any) -> None:
    with pytest.raises(ValueError, match=rf"FederatedServer\.{name} must be one of auto, .* got {value!r}"):
        FederatedServer(FedADMM(), **{name: value})


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_in_place_touch_neither_questions_nor_earlier_answers(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Smooth(optimizer=optimizer)
    seen: list[tuple[Tensor | None, Tensor]] = []

    def watched(local: StackedLocal, questions: Questions, plans: Any) -> Answers:
        given = [questions.start, questions.constant]
        before = [None if part is None else part.clone() for part in given]
        answers = solve(local, questions, plans)
        seen.extend((part, kept) for part, kept in zip(given, before, strict=True) if kept is not None)
        seen.append((answers.x, answers.x.clone()))
        return answers

    solve = StackedLocal.solve
    monkeypatch.setattr(StackedLocal, "solve", watched)
    fit("vectorized", FedADMM(eta=0.5), module)
    assert len(seen) == 9
    for tensor, kept in seen:
        torch.testing.assert_close(tensor, kept, rtol=0, atol=0)
