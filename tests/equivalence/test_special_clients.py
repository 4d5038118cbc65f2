"""Losses that are a mean over samples for most clients, and not for one: each gradient is that of a whole batch."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Iterator, Sequence
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.c_steps import needs_compiler
from helpers.marks import quick_first
from helpers.modules import Witness, quiet_trainer
from helpers.stacks import TOLERANCE, memories
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedDyn, Scaffold
from lightning_fed.engines import ClientError
from lightning_fed.local.native.codegen.program import Steps

BATCH = 4
#: Samples of the clients: below, at and above the batch size; epochs end with full batches or with batches of two.
SIZES = (10, 8, 2, 10, 2, 12)
POSITIONS = range(len(SIZES))
CLASSES, LENGTH, WIDTH, WORDS = 4, 3, 5, 7
RARE, PADDING = CLASSES - 1, -100

ALGORITHMS: list[Algorithm] = [
    FedADMM(eta=0.5),
    FedAvg(),
    Scaffold(),
    FedDyn(alpha=0.5, start="local"),
    FedDR(eta_hat=2.0),
]
STEPS: dict[str, Any] = {"local_steps": 4}
EPOCHS: dict[str, Any] = {"local_epochs": 1}
SEQUENTIAL: dict[str, Any] = {"engine": "sequential"}
RECORDED: dict[str, Any] = {"engine": "vectorized", "compile": False}
IN_C: dict[str, Any] = {"engine": "vectorized", "compile": True}


def normal(g: torch.Generator, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=g, dtype=torch.float64)


def labels(g: torch.Generator, *shape: int, classes: int = CLASSES) -> Tensor:
    return torch.randint(0, classes, shape, generator=g)


class Special(pl.LightningModule):
    """In float64; a subclass says what the loss of a batch is, and what data a client has."""

    def __init__(self) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.build()
        self.double()

    def build(self) -> None:
        self.net: nn.Module = nn.Linear(WIDTH, CLASSES)

    def loss_of(self, *batch: Tensor) -> Tensor:
        raise NotImplementedError

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        raise NotImplementedError

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = self.loss_of(*batch)
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.1)


class ClassWeights(Special):
    """A rare class counts much more than the others. Only the special client has any of it."""

    def build(self) -> None:
        super().build()
        self.register_buffer("weight", torch.tensor([1.0] * RARE + [20.0]))

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x), y, weight=self.weight)

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        y = labels(g, n, classes=RARE)
        y[::2] = RARE if special else 0
        return [normal(g, n, WIDTH), y]


class PaddedSequences(Special):
    """A mean over the tokens of a batch that are not padding. Only the special client's sequences are padded."""

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(x).flatten(0, 1), y.flatten(), ignore_index=PADDING)

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        y = labels(g, n, LENGTH)
        if special:  # sequences of one token, two, three, one, ...
            lengths = 1 + torch.arange(n) % LENGTH
            y[torch.arange(LENGTH) >= lengths.unsqueeze(1)] = PADDING
        return [normal(g, n, LENGTH, WIDTH), y]


class PaddedTexts(PaddedSequences):
    """Words instead of vectors. One text is nothing but padding, but never alone: every batch has a token."""

    def build(self) -> None:
        self.net = nn.Embedding(WORDS, CLASSES)

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        _, y = PaddedSequences.samples(n, special, g)
        if special:
            y[0] = PADDING
        return [labels(g, n, LENGTH, classes=WORDS), y]


class ImportanceWeights(Special):
    """Samples have weights of their own: ones, but for the special client."""

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y, w = batch
        each = nn.functional.cross_entropy(self.net(x), y, reduction="none")
        return (w * each).sum() / w.sum()

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        w = torch.rand(n, generator=g, dtype=torch.float64).mul(6).exp()
        return [normal(g, n, WIDTH), labels(g, n), w if special else torch.ones_like(w)]


class MaskedClasses(Special):
    """Classes that a sample cannot have get the logit -inf. Only samples of the special client have such classes."""

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y, allowed = batch
        return nn.functional.cross_entropy(self.net(x).masked_fill(~allowed, float("-inf")), y)

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        y = labels(g, n)
        allowed = torch.rand(n, CLASSES, generator=g) < (0.4 if special else 2)
        allowed[torch.arange(n), y] = True
        return [normal(g, n, WIDTH), y, allowed]


class MissingValues(Special):
    """Features that are NaN or infinite count as zero. Only the special client has such features."""

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y = batch
        return nn.functional.cross_entropy(self.net(torch.where(x.isfinite(), x, 0.0)), y)

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        x = normal(g, n, WIDTH)
        if special:
            x[:, 0], x[:, 1], x[0, 2] = float("nan"), float("inf"), float("-inf")
        return [x, labels(g, n)]


class Contrasts(Special):
    """One view of a sample has to find the other view among those of its batch (InfoNCE)."""

    def loss_of(self, *batch: Tensor) -> Tensor:
        one, other = map(self.net, batch)
        return nn.functional.cross_entropy(one @ other.T, torch.arange(len(one)))

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        x = normal(g, n, WIDTH)
        return [x + 0.1 * normal(g, n, WIDTH), x + 0.1 * normal(g, n, WIDTH)]


class Pairs(Special):
    """Every sample of a batch is compared with every other: alike if they have the same label, else apart."""

    def build(self) -> None:
        self.net = nn.Linear(WIDTH, CLASSES, bias=False)

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y = batch
        z = self.net(x)
        squared = (z.unsqueeze(0) - z.unsqueeze(1)).square().sum(2)
        alike = (y.unsqueeze(0) == y.unsqueeze(1)).to(z.dtype)
        return (alike * squared + (1.0 - alike) * (9.0 - squared).relu()).sum() / len(y) ** 2

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        return [normal(g, n, WIDTH), torch.arange(n) // 2 % 2]


class PairsWithABias(Pairs):
    """A bias that all samples have in common is not seen in comparisons: its gradient is zero but for rounding."""

    def build(self) -> None:
        self.net = nn.Linear(WIDTH, CLASSES)


class Attention(Special):
    """Tokens of a sequence look at each other. What keys have in common no query sees: their bias has no gradient."""

    def build(self) -> None:
        self.queries, self.keys, self.values = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.net = nn.Linear(WIDTH, CLASSES)

    def loss_of(self, *batch: Tensor) -> Tensor:
        x, y = batch
        seen = (self.queries(x) @ self.keys(x).transpose(1, 2)).softmax(2) @ self.values(x)
        return nn.functional.cross_entropy(self.net(seen).flatten(0, 1), y.flatten())

    @staticmethod
    def samples(n: int, special: bool, g: torch.Generator) -> list[Tensor]:
        return PaddedSequences.samples(n, False, g)


class Distance(pl.LightningModule):
    """The mean distance of w from the samples of a batch; where w meets one of them, the gradient is NaN."""

    momentum = 0.0

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.zeros(2, dtype=torch.float64))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = (self.w - batch[0]).square().sum(1).sqrt().mean()
        self.log("train_loss", loss, batch_size=len(batch[0]))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.5, momentum=self.momentum)


class DistanceWithMomentum(Distance):
    momentum = 0.5


def federation(kind: type[Special], special: int | None) -> FederatedDataModule:
    """Clients of all sizes, with the special one at this position."""
    g = torch.Generator().manual_seed(1)
    samples = [kind.samples(n, i == special, g) for i, n in enumerate(SIZES)]
    return FederatedDataModule({f"c{i}": TensorDataset(*own) for i, own in enumerate(samples)}, batch_size=BATCH)


def fit(
    module: pl.LightningModule, data: FederatedDataModule, algorithm: Algorithm, **options: Any
) -> tuple[dict[str, Tensor], dict[str, float], list[dict[Any, Tensor]]]:
    """What server and clients remember in the end, what was logged, and the local models of each round."""
    server, witness = FederatedServer(algorithm, seed=3, evaluate_every=0, **options), Witness()
    trainer = quiet_trainer(server, 2, callbacks=[witness])
    trainer.fit(module, datamodule=data)
    assert witness.cohorts == [list(data.splits["train"])] * 2  # positions in the data are positions in the cohort
    logged = {name: float(v) for name, v in trainer.callback_metrics.items() if name != "federated/seconds"}
    return memories(server), logged, witness.x_i


def assert_same(found: dict[Any, Tensor], expected: dict[Any, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert bool(value.isfinite().all()), name
        assert torch.allclose(found[name].double(), value.double(), rtol=0, atol=TOLERANCE), name


def assert_agree(
    module: type[pl.LightningModule], data: FederatedDataModule, algorithm: Algorithm, *ways: dict[str, Any]
) -> None:
    """Clients trained side by side in each of these ways end where clients trained one by one end."""
    for way in ways:
        expected, logged, locals_ = fit(module(), data, algorithm, **{**way, **SEQUENTIAL, "compile": False})
        found, also_logged, also_locals = fit(module(), data, algorithm, **way)
        assert_same(found, expected)
        for one, other in zip(also_locals, locals_, strict=True):
            assert_same(one, other)
        assert also_logged == pytest.approx(logged, rel=1e-6, abs=1e-9)


def is_a_mean(module: Special, dataset: TensorDataset) -> bool:
    """Whether the loss of a batch is the mean of its samples' losses, for batches of samples as they are stored."""
    with torch.no_grad():
        for batch in zip(*(part.split(BATCH) for part in dataset.tensors), strict=True):
            singly = [module.loss_of(*(part[[i]] for part in batch)) for i in range(len(batch[0]))]
            if not torch.allclose(module.loss_of(*batch), torch.stack(singly).mean(), rtol=0, atol=1e-3):
                return False
    return True


def is_ordinary(dataset: TensorDataset) -> bool:
    """Whether all numbers are finite, and no mask leaves anything out."""
    return all(bool((part if part.dtype == torch.bool else part.isfinite()).all()) for part in dataset.tensors)


@pytest.fixture(scope="module", autouse=True)
def _less_to_collect() -> Iterator[None]:
    """Recorded graphs are garbage in circles: what was there before them need not be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


def each(name: str, kinds: Sequence[Any]) -> pytest.MarkDecorator:
    return pytest.mark.parametrize(name, kinds, ids=lambda kind: getattr(kind, "__name__", type(kind).__name__))


SPECIAL = [ClassWeights, PaddedSequences, PaddedTexts, ImportanceWeights]
COMPARING = [Contrasts, Pairs]


@each("kind", SPECIAL)
def test_only_the_special_client_has_a_loss_that_is_no_mean_over_samples(kind: type[Special]) -> None:
    for position in POSITIONS:
        clients = federation(kind, position).splits["train"].values()
        assert [not is_a_mean(kind(), dataset) for dataset in clients] == [i == position for i in POSITIONS]


@each("kind", COMPARING)
def test_a_loss_that_compares_samples_is_nobodys_mean_over_samples(kind: type[Special]) -> None:
    assert not any(is_a_mean(kind(), dataset) for dataset in federation(kind, None).splits["train"].values())


@pytest.mark.parametrize("position", quick_first(POSITIONS))
@each("kind", SPECIAL)
def test_a_special_client_is_trained_on_its_own_loss_at_any_position(kind: type[Special], position: int) -> None:
    """Every kind at every position, recorded and in C; algorithms and budgets take turns."""
    turn = SPECIAL.index(kind) + position
    ways = [{**RECORDED, **STEPS}, {**IN_C, **EPOCHS}] if turn % 2 else [{**IN_C, **STEPS}, {**RECORDED, **EPOCHS}]
    assert_agree(kind, federation(kind, position), ALGORITHMS[turn % len(ALGORITHMS)], *ways)


@each("algorithm", ALGORITHMS)
def test_samples_are_compared_with_those_of_their_own_batch(algorithm: Algorithm) -> None:
    ways = itertools.cycle(itertools.product((RECORDED, IN_C), (STEPS, EPOCHS)))
    engine, budget = dict(zip(ALGORITHMS, ways, strict=False))[algorithm]
    assert_agree(Pairs, federation(Pairs, None), algorithm, {**engine, **budget})


@each("kind", [PairsWithABias, Attention])
def test_a_parameter_whose_gradient_is_zero_but_for_rounding_is_stacked(kind: type[Special]) -> None:
    assert_agree(kind, federation(kind, None), FedADMM(), {**RECORDED, **STEPS})


def test_a_sum_divided_by_the_batch_size_is_taken_apart_like_a_mean(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO", logger="lightning_fed")
    fit(Pairs(), federation(Pairs, None), FedAvg(), **RECORDED, **STEPS)
    assert [text for text in caplog.messages if "replayed as recorded" in text] == []


def test_samples_are_told_from_others_of_their_own_batch() -> None:
    assert_agree(Contrasts, federation(Contrasts, None), FedADMM(), {**RECORDED, **STEPS}, {**IN_C, **EPOCHS})


@pytest.mark.parametrize("position", quick_first([2, 5]))
@each("kind", [MaskedClasses, MissingValues])
def test_what_is_not_finite_stays_with_its_client_and_does_no_harm(kind: type[Special], position: int) -> None:
    data = federation(kind, position)
    clients = data.splits["train"].values()
    assert [not is_ordinary(dataset) for dataset in clients] == [i == position for i in POSITIONS]
    assert_agree(kind, data, ALGORITHMS[position % len(ALGORITHMS)], {**IN_C, **STEPS}, {**RECORDED, **EPOCHS})


@pytest.mark.parametrize("position", quick_first([0, 2]))
@pytest.mark.parametrize("others", [(4, 6, 8), (4, 5, 3)], ids=["full batches", "short batches"])
@pytest.mark.parametrize(
    ("kind", "way"),
    [(Distance, RECORDED), (Distance, IN_C), (DistanceWithMomentum, RECORDED)],
    ids=["recorded", "in C", "momentum"],
)
def test_a_client_that_waits_where_its_gradient_is_nan_waits_unchanged(
    kind: type[Distance], way: dict[str, Any], others: tuple[int, ...], position: int
) -> None:
    """One step takes the client from 0 to where all its samples are, while others have more steps to go."""
    goal = torch.tensor([[0.5, 0.0]], dtype=torch.float64)
    g = torch.Generator().manual_seed(2)
    parts = [normal(g, n, 2) + 5 for n in others]
    parts.insert(position, goal.repeat(2, 1))
    data = FederatedDataModule({f"c{i}": TensorDataset(part) for i, part in enumerate(parts)}, batch_size=2)

    *_, (first, _) = fit(kind(), data, FedAvg(), **SEQUENTIAL, **EPOCHS)
    end = first[f"c{position}"].clone().requires_grad_()
    assert torch.equal(end, goal[0])
    (end - goal).square().sum(1).sqrt().mean().backward()
    assert bool(end.grad.isnan().all())
    assert_agree(kind, data, FedAvg(), {**way, **EPOCHS})


@pytest.mark.parametrize("position", quick_first([3, 0, 4]))
@pytest.mark.parametrize("way", [RECORDED, IN_C], ids=["recorded", "in C"])
def test_a_client_whose_loss_is_not_finite_is_named_whoever_waits(way: dict[str, Any], position: int) -> None:
    data = federation(ImportanceWeights, None)
    x, y, w = data.splits["train"][f"c{position}"].tensors
    data.splits["train"][f"c{position}"] = TensorDataset(x, y, w * float("nan"))
    with pytest.raises(ClientError, match=f"round 0, client 'c{position}'.*loss"):
        fit(ImportanceWeights(), data, FedADMM(), **way, **EPOCHS)


@needs_compiler
@each("kind", [ClassWeights, PaddedSequences, ImportanceWeights, MaskedClasses, MissingValues, Pairs])
def test_these_losses_are_written_in_c(kind: type[Special], monkeypatch: pytest.MonkeyPatch) -> None:
    """So that what the tests above say about C is about C."""
    seen: list[int] = []
    call = Steps.__call__

    def counted(self: Steps, client: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        seen.append(len(client[0]))
        return call(self, client, *rest)

    monkeypatch.setattr(Steps, "__call__", counted)
    fit(kind(), federation(kind, 3), FedADMM(), **IN_C, **STEPS)
    assert seen.count(sum(n >= BATCH for n in SIZES)) == 2  # one call in each round
