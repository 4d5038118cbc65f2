"""Many clients evaluated together have the figures of clients evaluated one by one."""

from __future__ import annotations

import weakref
from dataclasses import replace
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer
from torch import Tensor, nn
from torchmetrics import MeanSquaredError, Metric
from torchmetrics.classification import (
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCohenKappa,
    MulticlassF1Score,
    MulticlassStatScores,
)

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, Scaffold
from lightning_fed.core.algorithm import tree_map
from lightning_fed.evaluation.evaluate import evaluate_own, evaluate_splits
from lightning_fed.evaluation.results import ClientEvaluations


class Logged(Net):
    stackable = loss_is_mean = True


class WithMetric(Net):
    """Accuracy as a metric, and a validation step that returns nothing."""

    stackable = loss_is_mean = True

    def __init__(self, metric: str = "accuracy", **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self.acc = MulticlassAccuracy(3, average="micro") if metric == "accuracy" else MulticlassF1Score(3)

    def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.acc.update(logits, y)
        self.log(f"{stage}_loss", loss, batch_size=len(y))
        self.log(f"{stage}_acc", self.acc, batch_size=len(y), on_step=False, on_epoch=True)
        return loss

    def validation_step(self, batch: list[Tensor], batch_idx: int) -> None:
        self._loss(batch, "val")


class Sums(Net):
    """Not a mean over samples, and does not say so."""

    stackable = True

    def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
        loss = nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")
        self.log(f"{stage}_loss", loss, batch_size=len(batch[1]))
        return loss


class Counts(Net):
    """What it does in evaluation is undone."""

    stackable = loss_is_mean = True
    calls = 0

    def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
        self.calls += 1
        return super()._loss(batch, stage)


class Several(Net):
    """Metrics of the module, and further numbers by name."""

    stackable = loss_is_mean = True

    def __init__(self, *metrics: Metric, numbers: str = "", **options: Any) -> None:
        super().__init__()
        self.metrics, self.numbers, self.options = nn.ModuleList(metrics), numbers, options

    def _loss(self, batch: list[Tensor], stage: str) -> Tensor:
        x, y = batch
        logits = self(x)
        for metric in self.metrics:
            if isinstance(metric, MeanSquaredError):
                metric.update(logits.argmax(1).float(), y.float())
            else:
                metric.update(logits, y)
            self.log(f"{stage}_{type(metric).__name__}", metric, on_step=False, on_epoch=True, batch_size=len(y))
        value = (logits.argmax(1) - y).float().square().mean().sqrt()
        for name in self.numbers.split():
            self.log(f"{stage}_{name}", value if name == "rmse" else value.square(), **self.options)
        return nn.functional.cross_entropy(logits, y)


class Reads(pl.Callback):
    """The server's model on train and test data, and clients' own models on test data."""

    found: dict[str, ClientEvaluations]

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        federation = trainer.fit_loop.server.federation
        self.found = {**evaluate_splits(trainer), "own": ClientEvaluations(evaluate_own(trainer, federation, "test"))}


def evaluated(module: pl.LightningModule, **options: Any) -> dict[str, ClientEvaluations]:
    reads = Reads()
    server = FederatedServer(FedADMM(), local_steps=2, seed=1, clients_per_round=18, evaluate_every=0)
    trainer = quiet_trainer(server, 1, callbacks=[reads], limit_val_batches=0)
    trainer.fit(module, datamodule=classification(20, **options))
    return reads.found


KINDS = {
    "undeclared": Net,
    "logged": Logged,
    "metric": WithMetric,
    "normalised": lambda: WithMetric(norm=True, dropout=0.5),
    "macro": lambda: WithMetric("f1"),
    "sums": Sums,
    "counts": Counts,
}

#: Modules with metrics besides loss and accuracy, and whether their clients can be taken together.
FURTHER = {
    "sums over samples": (
        lambda: Several(MulticlassF1Score(3), MeanSquaredError(squared=False), MulticlassCohenKappa(3)),
        True,
    ),
    "share of correct": (lambda: Several(MulticlassAccuracy(3, average="micro")), True),
    "means by name": (lambda: Several(numbers="aux_loss top_acc other_acc"), True),
    "no sum": (lambda: Several(MulticlassF1Score(3), MulticlassAUROC(3)), False),
    "no number": (lambda: Several(MulticlassStatScores(3)), False),
    "no mean": (lambda: Several(numbers="rmse"), False),
    "summed": (lambda: Several(numbers="aux_loss", reduce_fx="sum"), False),
    "weighted": (lambda: Several(numbers="aux_loss", batch_size=3), False),
}


def assert_same(together: dict[str, ClientEvaluations], alone: dict[str, ClientEvaluations]) -> None:
    assert [len(found.by_client) for found in together.values()] == [20, 20, 18]
    for split in together:
        assert list(together[split].by_client) == list(alone[split].by_client)
        for cid, expected in alone[split].by_client.items():
            found = together[split].by_client[cid]
            assert (found.examples, found.higher_is_better) == (expected.examples, expected.higher_is_better)
            assert list(found.others) == list(expected.others)
            assert (found.loss, found.accuracy, *found.others.values()) == pytest.approx(
                (expected.loss, expected.accuracy, *expected.others.values()), rel=1e-5, nan_ok=True
            )


@pytest.mark.filterwarnings("ignore:Training changes the attribute calls")
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("eval_batch_size", [7, 64, 10_000])
def test_together_and_one_by_one_agree(kind: str, eval_batch_size: int, monkeypatch: pytest.MonkeyPatch) -> None:
    together = evaluated(KINDS[kind](), eval_batch_size=eval_batch_size)
    monkeypatch.setattr("lightning_fed.evaluation.evaluate.MANY", 10**9)
    assert_same(together, evaluated(KINDS[kind](), eval_batch_size=eval_batch_size))


@pytest.fixture
def singles(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Clients that are evaluated one by one."""
    from lightning_fed.evaluation import evaluate as measure

    found: list[Any] = []
    original = measure._evaluate

    def one_by_one(trainer: Any, cid: Any, *args: Any, **kwargs: Any) -> Any:
        found.append(cid)
        return original(trainer, cid, *args, **kwargs)

    monkeypatch.setattr(measure, "_evaluate", one_by_one)
    return found


@pytest.mark.filterwarnings("ignore:.* samples in targets")  # torchmetrics, about AUROC of clients without a class
@pytest.mark.parametrize("kind", FURTHER)
def test_further_metrics_agree_or_are_taken_one_by_one(
    kind: str, singles: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    module, used = FURTHER[kind]
    together = evaluated(module(), eval_batch_size=7)
    assert len(singles) == (0 if used else 20 + 20 + 18)
    monkeypatch.setattr("lightning_fed.evaluation.evaluate.MANY", 10**9)
    if used:
        assert_same(together, evaluated(module(), eval_batch_size=7))


@pytest.mark.parametrize(
    ("kind", "used"),
    [("undeclared", False), ("logged", True), ("metric", True), ("macro", True), ("sums", False)],
)
def test_clients_are_taken_together_where_that_is_right(kind: str, used: bool, singles: list[Any]) -> None:
    evaluated(KINDS[kind]())
    assert len(singles) == (0 if used else 20 + 20 + 18)


def test_nothing_of_the_module_is_left_changed() -> None:
    module = Counts()
    with pytest.warns(UserWarning, match="Training changes the attribute calls"):
        evaluated(module)
    assert "calls" not in vars(module)
    assert not any(isinstance(value, Tensor) for value in vars(module).values())
    assert torch.is_grad_enabled()


class Watched:
    """A store that gives copies of states, as one on disk does, and counts how many of them are alive."""

    def __init__(self, store: Any) -> None:
        self.store, self.alive, self.most, self.recalled = store, 0, 0, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self.store, name)

    def __getitem__(self, cid: Any) -> Any:
        return self.get(cid)

    def get(self, cid: Any) -> Any:
        memory = self.store.get(cid)
        state = tree_map(Tensor.clone, memory.state)
        for model in [state.x_i] if hasattr(state, "x_i") else []:
            self.alive += 1
            weakref.finalize(model, self._gone)
        self.most, self.recalled = max(self.most, self.alive), self.recalled + 1
        return replace(memory, state=state)

    def _gone(self) -> None:
        self.alive -= 1


class Watches(pl.Callback):
    """Evaluates clients' own models, and says how many were alive at once."""

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        federation = trainer.fit_loop.server.federation
        self.expected = evaluate_own(trainer, federation, "test")
        store, federation.store = federation.store, Watched(federation.store)
        self.found, self.watched = evaluate_own(trainer, federation, "test"), federation.store
        federation.store = store


@pytest.mark.parametrize(("module", "most"), [(Net, 2), (Logged, 5)], ids=["one by one", "together"])
def test_few_of_the_clients_own_models_are_in_memory_at_once(
    module: Any, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fed.evaluation.by_sample.STACK", 5)
    watches = Watches()
    server = FederatedServer(FedADMM(), local_steps=2, seed=1, clients_per_round=18, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[watches], limit_val_batches=0).fit(module(), datamodule=classification(20))
    assert len(watches.found) == 18
    assert watches.found == watches.expected
    assert 0 < watches.watched.most <= most


def test_no_state_is_recalled_if_the_algorithm_keeps_no_model() -> None:
    watches = Watches()
    server = FederatedServer(Scaffold(), local_steps=2, seed=1, clients_per_round=18, evaluate_every=0)
    quiet_trainer(server, 1, callbacks=[watches], limit_val_batches=0).fit(Net(), datamodule=classification(20))
    assert watches.found == {}
    assert watches.watched.recalled == 0
