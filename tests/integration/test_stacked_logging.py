"""What training steps log, and the metrics they update, do not depend on whether clients are trained side by side."""

from __future__ import annotations

import functools
import gc
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.c_steps import needs_compiler
from helpers.modules import quiet_trainer
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MaxMetric, MeanAbsoluteError, MeanMetric, MeanSquaredError, Metric, SumMetric
from torchmetrics.aggregation import RunningMean
from torchmetrics.classification import (
    BinaryAccuracy,
    BinaryF1Score,
    MulticlassAccuracy,
    MulticlassAUROC,
    MulticlassCalibrationError,
    MulticlassF1Score,
    MultilabelAccuracy,
)

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedLin, FedPD, FedProx, Scaffold
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.local.native.codegen.program import Steps

BATCH, WIDTH, CLASSES = 4, 5, 3
#: Samples of the clients: clients with batches of two and three come between those with batches of four.
SIZES = (9, 3, 8, 2, 4, 7, 3)

STEPS: dict[str, Any] = {"local_steps": 4}
EPOCHS: dict[str, Any] = {"local_epochs": 2}
BUDGETS = {"steps": STEPS, "epochs": EPOCHS}
each_budget = pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
each_way = pytest.mark.parametrize(
    "compile_", [False, pytest.param(True, marks=needs_compiler)], ids=["recorded", "in C"]
)


class Plain(pl.LightningModule):
    """A classifier that logs nothing; small, for it is recorded many times."""

    momentum = 0.0

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(WIDTH, CLASSES)
        self.double()

    def note(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor) -> None:
        """Log something."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        logits = self.net(x)
        loss = nn.functional.cross_entropy(logits, y)
        self.note(x, y, logits, loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1, momentum=self.momentum)


def federation(sizes: tuple[int, ...] = SIZES) -> FederatedDataModule:
    g = torch.Generator().manual_seed(1)
    clients = {}
    for i, n in enumerate(sizes):
        x = torch.randn(n, WIDTH, generator=g, dtype=torch.float64) + i / len(sizes)
        y = (x @ torch.randn(WIDTH, CLASSES, generator=g, dtype=torch.float64)).argmax(1)
        clients[f"c{i}"] = TensorDataset(x, y)
    return FederatedDataModule(clients, batch_size=BATCH)


class Logged(FederatedCallback):
    """What is known at the end of each round and of the fit, but for how long it took."""

    def __init__(self) -> None:
        self.known: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = trainer.callback_metrics.items()
        self.known.append({name: float(value) for name, value in known if name != "federated/seconds"})

    on_fit_end = on_train_epoch_end


def fit(
    module: pl.LightningModule,
    engine: str,
    compile_: bool = False,
    algorithm: Algorithm | None = None,
    sizes: tuple[int, ...] = SIZES,
    callbacks: tuple[Any, ...] = (),
    **options: Any,
) -> list[dict[str, float]]:
    """What was known after each of two rounds, and in the end."""
    logged = Logged()
    settings = {"seed": 3, "evaluate_every": 0, "engine": engine, "compile": compile_, **options}
    trainer = quiet_trainer(
        FederatedServer(algorithm or FedADMM(eta=0.5), **settings), 2, callbacks=[logged, *callbacks]
    )
    trainer.fit(module, datamodule=federation(sizes))
    return logged.known


def assert_logs_agree(found: list[dict[str, float]], expected: list[dict[str, float]], *names: str) -> None:
    """All that was known at any time, or what has these names."""
    assert len(found) == len(expected) == 3
    for ours, theirs in zip(found, expected, strict=True):
        assert ours.keys() == theirs.keys()
        wanted = {name: theirs[name] for name in names or theirs}
        assert {name: ours[name] for name in wanted} == pytest.approx(wanted, rel=1e-6, abs=1e-12)


def assert_engines_log_the_same(kind: type[pl.LightningModule], *names: str, compile_: bool = False, **kw: Any) -> None:
    expected = fit(kind(), "sequential", **kw)
    assert_logs_agree(fit(kind(), "vectorized", compile_, **kw), expected)
    assert set(names) <= expected[-1].keys()


@pytest.fixture(scope="module", autouse=True)
def _less_to_collect() -> Iterator[None]:
    """Recorded graphs are garbage in circles: what was there before them need not be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


# Numbers.


class LogsNumbers(Plain):
    """By every ``reduce_fx``, with and without ``batch_size``: of the model, of data, of both and of neither."""

    def note(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor) -> None:
        n = len(y)
        for fx in ("mean", "sum", "min", "max"):
            self.log(f"loss {fx}", loss, reduce_fx=fx, batch_size=n)
        self.log("loss counted alike", loss, batch_size=1)
        self.log("loss counted by Lightning", loss)
        self.log("loss counted by square", loss.detach(), batch_size=n * n)
        self.log("loss at both times", loss, on_step=True, on_epoch=True, batch_size=n)
        self.log("loss at the end", loss, on_step=False, on_epoch=True, prog_bar=True, batch_size=n)
        self.log("largest by function", logits.max(), reduce_fx=torch.max)
        self.log("smallest by function", logits.min(), reduce_fx=torch.min)
        self.log("sum by function", logits.sum(), reduce_fx=torch.sum)
        self.log("right", (logits.argmax(1) == y).sum(), reduce_fx="sum")
        self.log("share", (logits.argmax(1) == y).float().mean(), batch_size=n)
        self.log("of data", x.mean(), batch_size=n)
        self.log("of labels", y.sum(), reduce_fx="max")
        self.log("of the model", self.net.weight.square().sum(), batch_size=n)
        self.log("a weight itself", self.net.bias[0], reduce_fx="min")
        self.log("of neither", torch.tensor(2.5, dtype=torch.float64), batch_size=n)
        self.log("size", n, batch_size=n)
        self.log("samples", float(n), reduce_fx="sum")
        self.log("smallest size", float(n), reduce_fx="min")
        self.log_dict({"a": loss.exp(), "b": logits.std(), "c": 3}, batch_size=n)
        self.log_dict({"d": loss, "e": 1.0}, reduce_fx="sum")


class LogsNumbersWithMomentum(LogsNumbers):
    momentum = 0.9


@pytest.mark.filterwarnings("ignore:.*the value needs to be floating to be reduced")
@each_way
@each_budget
def test_numbers_are_reduced_as_lightning_does_it(budget: dict[str, Any], compile_: bool) -> None:
    assert_engines_log_the_same(LogsNumbers, "loss sum", "a weight itself", "size", compile_=compile_, **budget)


@pytest.mark.filterwarnings("ignore:.*the value needs to be floating to be reduced")
def test_numbers_of_optimisers_with_memory_are_reduced_as_lightning_does_it() -> None:
    assert_engines_log_the_same(LogsNumbersWithMomentum, **EPOCHS)


@pytest.mark.filterwarnings("ignore:.*the value needs to be floating to be reduced")
def test_numbers_of_several_stacks_are_reduced_together(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 2)
    assert_engines_log_the_same(LogsNumbers, **STEPS)


class LogsOnlyOfSome(Plain):
    """Some batches log, some update a metric: a batch's shape decides."""

    def __init__(self) -> None:
        super().__init__()
        self.losses = MeanMetric()

    def note(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor) -> None:
        if len(y) == BATCH:
            self.log("loss of full batches", loss, batch_size=len(y))
            self.losses.update(loss)
            self.log("also of full batches", self.losses)
        if len(y) < 3:
            self.log("loss of small batches", loss, reduce_fx="max")
        self.log("loss", loss / len(y), batch_size=len(y))


@each_way
@each_budget
def test_what_only_batches_of_some_size_log_is_theirs(budget: dict[str, Any], compile_: bool) -> None:
    names = "loss of full batches", "also of full batches", "loss of small batches"
    assert_engines_log_the_same(LogsOnlyOfSome, *names, compile_=compile_, **budget)


# Metrics.


class Last(Metric):
    """The mean of the latest batch's loss: the order of batches matters, and nothing else."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("value", torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, loss: Tensor) -> None:
        self.value = loss.detach().clone()

    def compute(self) -> Tensor:
        return self.value


class Fading(Metric):
    """An exponential moving average over batches."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("average", torch.zeros((), dtype=torch.float64), dist_reduce_fx=None)

    def update(self, loss: Tensor) -> None:
        self.average = 0.8 * self.average + 0.2 * loss.detach()

    def compute(self) -> Tensor:
        return self.average


class MeanOfSquaredSums(Metric):
    """The mean over batches of the square of a sum over samples: it matters how samples come in batches."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")
        self.add_state("batches", torch.tensor(0), dist_reduce_fx="sum")

    def update(self, logits: Tensor, y: Tensor) -> None:
        self.total += (logits.detach().amax(1) + y).sum().square()
        self.batches += 1

    def compute(self) -> Tensor:
        return self.total / self.batches


class MedianBatch(Metric):
    """Keeps a list, with one entry for each batch."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("sizes", [], dist_reduce_fx="cat")

    def update(self, y: Tensor) -> None:
        self.sizes.append(torch.tensor([float(len(y)) + float(y.sum()) / 100]))

    def compute(self) -> Tensor:
        return torch.cat(self.sizes).quantile(0.4)


class DistantError(MeanSquaredError):
    """A subclass of a metric that is a sum over samples, and is none itself."""

    def update(self, preds: Tensor, target: Tensor) -> None:
        super().update(preds.detach() * len(preds), target)


#: Metrics, and the arguments of their updates.
METRICS: dict[str, tuple[Callable[[], Metric], Callable[..., tuple[Tensor, ...]]]] = {
    # it is decided for each batch whether these are probabilities, or scores of which a sigmoid is to be taken
    "binary accuracy": (BinaryAccuracy, lambda x, y, logits, loss: (0.5 + 0.3 * logits[:, 0], (y == 0).long())),
    "binary f1": (BinaryF1Score, lambda x, y, logits, loss: (0.5 + 0.3 * logits[:, 2], (y == 2).long())),
    "binary accuracy of probabilities": (
        BinaryAccuracy,
        lambda x, y, logits, loss: (logits.softmax(1)[:, 0], (y == 0).long()),
    ),
    "accuracy of several labels": (
        lambda: MultilabelAccuracy(CLASSES),
        lambda x, y, logits, loss: (0.5 + 0.3 * logits, (y.unsqueeze(1) == torch.arange(CLASSES)).long()),
    ),
    "mean loss": (MeanMetric, lambda x, y, logits, loss: (loss,)),
    "weighted mean": (MeanMetric, lambda x, y, logits, loss: (logits.amax(1), y + 1.0)),
    "sum of losses": (SumMetric, lambda x, y, logits, loss: (loss,)),
    "largest loss": (MaxMetric, lambda x, y, logits, loss: (loss,)),
    "mean of samples": (MeanMetric, lambda x, y, logits, loss: (logits,)),
    "mean of the last three": (lambda: RunningMean(window=3), lambda x, y, logits, loss: (loss,)),
    "of one sample": (MeanMetric, lambda x, y, logits, loss: (logits[0] + x[0, 0],)),
    "area under curves": (lambda: MulticlassAUROC(CLASSES), lambda x, y, logits, loss: (logits, y)),
    "calibration": (lambda: MulticlassCalibrationError(CLASSES), lambda x, y, logits, loss: (logits, y)),
    "last loss": (Last, lambda x, y, logits, loss: (loss,)),
    "fading loss": (Fading, lambda x, y, logits, loss: (loss,)),
    "squared sums": (MeanOfSquaredSums, lambda x, y, logits, loss: (logits, y)),
    "median batch": (MedianBatch, lambda x, y, logits, loss: (y,)),
    "accuracy": (lambda: MulticlassAccuracy(CLASSES, average="micro"), lambda x, y, logits, loss: (logits, y)),
    "accuracy by class": (lambda: MulticlassAccuracy(CLASSES), lambda x, y, logits, loss: (logits.argmax(1), y)),
    "accuracy of two": (lambda: MulticlassAccuracy(CLASSES, top_k=2), lambda x, y, logits, loss: (logits, y)),
    "f1": (lambda: MulticlassF1Score(CLASSES, average="macro"), lambda x, y, logits, loss: (logits, y)),
    "squared error": (MeanSquaredError, lambda x, y, logits, loss: (logits[:, 0], y.double())),
    "squared error of a batch": (MeanSquaredError, lambda x, y, logits, loss: (loss, loss * 0)),
    "absolute error": (MeanAbsoluteError, lambda x, y, logits, loss: (logits, logits.square())),
    "distant error": (DistantError, lambda x, y, logits, loss: (logits[:, 0], y.double())),
}


class UpdatesMetrics(Plain):
    """All of them."""

    def __init__(self) -> None:
        super().__init__()
        self.metrics = nn.ModuleDict({name: make() for name, (make, _) in METRICS.items()})

    def note(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor) -> None:
        for name, (_, arguments) in METRICS.items():
            self.metrics[name].update(*arguments(x, y, logits, loss))
            self.log(name, self.metrics[name], on_step=False, on_epoch=True)


@functools.cache
def logged_metrics(engine: str, compile_: bool, budget: str) -> list[dict[str, float]]:
    return fit(UpdatesMetrics(), engine, compile_, **BUDGETS[budget])


@each_way
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("name", METRICS)
def test_metrics_have_the_values_that_they_have_one_by_one(name: str, budget: str, compile_: bool) -> None:
    expected = logged_metrics("sequential", False, budget)
    assert_logs_agree(logged_metrics("vectorized", compile_, budget), expected, name)


class Keeps(Metric):
    """The arguments of every update."""

    def __init__(self) -> None:
        super().__init__()
        for name in ("x", "y", "logits", "losses", "biases"):
            self.add_state(name, [], dist_reduce_fx=None)

    def update(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor, bias: Tensor) -> None:
        for kept, value in zip(self.kept(), (x, y, logits, loss, bias), strict=True):
            kept.append(value.detach().clone())

    def kept(self) -> tuple[list[Tensor], ...]:
        return self.x, self.y, self.logits, self.losses, self.biases

    def compute(self) -> Tensor:
        return torch.stack(self.losses).mean()


class KeepsBatches(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.batches = Keeps()

    def note(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor) -> None:
        self.batches.update(x, y, logits, loss, self.net.bias)
        self.log("kept", self.batches, on_step=False, on_epoch=True)


class Batches(FederatedCallback):
    """What a metric was updated with in all rounds, batch by batch."""

    def __init__(self) -> None:
        self.seen: list[tuple[Tensor, ...]] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.seen += zip(*module.batches.kept(), strict=True)


def batches(engine: str, compile_: bool = False, **kw: Any) -> list[tuple[Tensor, ...]]:
    kept = Batches()
    fit(KeepsBatches(), engine, compile_, callbacks=(kept,), **kw)
    return kept.seen


def assert_batches_agree(compile_: bool = False, **kw: Any) -> None:
    found, expected = batches("vectorized", compile_, **kw), batches("sequential", **kw)
    assert [len(y) for _, y, *_ in found] == [len(y) for _, y, *_ in expected]
    for ours, theirs in zip(found, expected, strict=True):
        assert torch.equal(ours[0], theirs[0])
        assert torch.equal(ours[1], theirs[1])
        torch.testing.assert_close(ours[2:], theirs[2:], rtol=0, atol=1e-10)


@each_way
@each_budget
def test_metrics_are_updated_batch_by_batch_in_the_order_of_the_cohort(
    budget: dict[str, Any], compile_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    in_c, call = [], Steps.__call__

    def noted(self: Steps, client: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        in_c.append(len(client[0]))
        return call(self, client, *rest)

    monkeypatch.setattr(Steps, "__call__", noted)
    assert_batches_agree(compile_, **budget)
    assert (sum(n >= BATCH for n in SIZES) in in_c) == compile_


@each_way
@each_budget
def test_the_order_is_kept_where_stacks_are_cut_into_blocks(
    budget: dict[str, Any], compile_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 4)
    monkeypatch.setattr("lightning_fed.local.stacked.batches.BLOCK_BYTES", 500)
    assert_batches_agree(compile_, clients_per_round=6, **budget)


@each_way
@each_budget
def test_copies_that_fill_a_stack_up_are_not_heard_of(budget: dict[str, Any], compile_: bool) -> None:
    """Stacks of 17 clients."""
    assert_batches_agree(compile_, sizes=(8, 4, 5) * 5 + (4, 9), **budget)


@pytest.mark.parametrize(
    "algorithm",
    [
        FedProx(mu=0.1, stragglers=0.6),
        Scaffold(option=1),
        FedLin(),
        FedPD(eta_hat=0.5, oracle="II", refresh_every=2),
    ],
    ids=["stragglers", "gradients besides", "two exchanges", "batches seen twice"],
)
def test_the_order_is_kept_whatever_clients_are_asked(algorithm: Algorithm) -> None:
    assert_batches_agree(algorithm=algorithm, local_epochs=1)


def value(name: str, seen: list[tuple[Tensor, ...]]) -> float:
    """Of a metric that is updated with these batches."""
    make, arguments = METRICS[name]
    metric = make()
    for x, y, logits, loss, _ in seen:
        metric.update(*arguments(x, y, logits, loss))
    return float(metric.compute())


#: Metrics that tell how samples come in batches, and those that tell the order of batches.
TELL_BATCHES = {"binary accuracy", "binary f1", "accuracy of several labels", "mean loss", "sum of losses"}
TELL_BATCHES |= {"largest loss", "of one sample", "squared sums", "median batch", "squared error of a batch"}
TELL_ORDER = {"mean of the last three", "last loss", "fading loss"}


def test_some_metrics_tell_batches_and_their_order_apart() -> None:
    """Otherwise it would say little that they have the values that they have one by one."""
    seen = batches("sequential", **STEPS)
    x, y, logits = (torch.cat(parts) for parts in list(zip(*seen, strict=True))[:3])
    together = [(x, y, logits, nn.functional.cross_entropy(logits, y), torch.empty(0))]
    by_size = sorted(seen, key=lambda batch: len(batch[1]))
    own = {name: value(name, seen) for name in METRICS}
    assert [name for name in TELL_BATCHES if value(name, together) == pytest.approx(own[name], rel=1e-3)] == []
    assert [name for name in TELL_ORDER if value(name, by_size) == pytest.approx(own[name], rel=1e-3)] == []


class EndsByItself(Plain):
    """Asks its metrics at the end of a round; one of them is updated twice in a step."""

    def __init__(self) -> None:
        super().__init__()
        self.fading, self.accuracy = Fading(), MulticlassAccuracy(CLASSES)

    def note(self, x: Tensor, y: Tensor, logits: Tensor, loss: Tensor) -> None:
        self.fading.update(loss)
        self.accuracy.update(logits, y)
        self.fading.update(loss.exp())

    def on_train_epoch_end(self) -> None:
        for name, metric in (("fading", self.fading), ("accuracy", self.accuracy)):
            self.log(name, metric.compute())
            metric.reset()


@each_way
def test_metrics_can_be_asked_at_the_end_of_a_round_and_updated_twice_in_a_step(compile_: bool) -> None:
    assert_engines_log_the_same(EndsByItself, "fading", "accuracy", compile_=compile_, **EPOCHS)
