"""Clients with less than a batch of samples, one batch and more end side by side where they end one by one."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.c_steps import needs_compiler
from helpers.modules import quiet_trainer
from helpers.problems import every_algorithm, name_of
from helpers.stacks import TOLERANCE, memories
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import TensorDataset
from torchmetrics import MeanSquaredError

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR, FedDualAvg, FedDyn, FedMid, FedProx, Scaffold
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.local.native.codegen.program import Steps
from lightning_fed.prox import L1
from lightning_fed.sampling import Bernoulli

BATCH, WIDTH = 5, 4
#: Samples of the clients: less than a batch, one batch, several, several and a short one.
SIZES = (7, 3, 10, 2, 5, 8, 15)

BUDGETS: dict[str, dict[str, Any]] = {"steps": {"local_steps": 4}, "epochs": {"local_epochs": 1}}
each_budget = pytest.mark.parametrize("budget", BUDGETS.values(), ids=BUDGETS)
each_way = pytest.mark.parametrize(
    "compile_", [False, pytest.param(True, marks=needs_compiler)], ids=["recorded", "in C"]
)


class Regression(pl.LightningModule):
    """In float64 throughout; logs its loss, a sum, and a metric. Small, for it is recorded many hundred times."""

    def __init__(self, optimizer: type[torch.optim.Optimizer] = torch.optim.SGD, **options: Any) -> None:
        super().__init__()
        self.optimizer, self.options = optimizer, {"lr": 0.05, **options}
        with torch.random.fork_rng():
            torch.manual_seed(0)
            self.net = nn.Linear(WIDTH, 1)
        self.error = MeanSquaredError()
        self.double()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        found = self.net(x).squeeze(1)
        loss = (found - y).square().mean()
        self.error.update(found, y)
        self.log("train_loss", loss, batch_size=len(y))
        self.log("samples", float(len(y)), reduce_fx="sum")
        self.log("train_error", self.error, on_step=False, on_epoch=True, batch_size=len(y))
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(self.parameters(), **self.options)


def federation(sizes: tuple[int, ...] = SIZES, **options: Any) -> FederatedDataModule:
    g = torch.Generator().manual_seed(1)
    clients = {}
    for i, n in enumerate(sizes):
        x = torch.randn(n, WIDTH, generator=g, dtype=torch.float64) + i / len(sizes)
        y = (x @ torch.randn(WIDTH, generator=g, dtype=torch.float64)).tanh()
        clients[f"c{i}"] = TensorDataset(x, y)
    return FederatedDataModule(clients, **{"batch_size": BATCH, **options})


class Logged(FederatedCallback):
    """What is known after each round, but for how long it took."""

    def __init__(self) -> None:
        self.rounds: list[dict[str, float]] = []

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        known = trainer.callback_metrics.items()
        self.rounds.append({name: float(value) for name, value in known if name != "federated/seconds"})


def fit(
    algorithm: Algorithm,
    module: Regression | None = None,
    *,
    rounds: int = 2,
    data: dict[str, Any] | None = None,
    trainer: dict[str, Any] | None = None,
    checkpoint: Path | None = None,
    **options: Any,
) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
    """What server and clients remember in the end, and what was logged in every round."""
    server, logged = FederatedServer(algorithm, **{"seed": 3, "evaluate_every": 0, **options}), Logged()
    given = dict(trainer or {})
    used = quiet_trainer(server, rounds, **{**given, "callbacks": [logged, *given.get("callbacks", [])]})
    used.fit(module or Regression(), datamodule=federation(**(data or {})), ckpt_path=checkpoint)
    return memories(server), logged.rounds


def assert_agree(
    algorithm: Algorithm, compile_: bool = False, *, model: dict[str, Any] | None = None, **kw: Any
) -> None:
    expected, logged = fit(algorithm, Regression(**(model or {})), engine="sequential", **kw)
    found, also_logged = fit(algorithm, Regression(**(model or {})), engine="vectorized", compile=compile_, **kw)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.allclose(found[name].double(), value.double(), rtol=0, atol=TOLERANCE), name
    assert {"train_loss", "samples", "train_error"} <= logged[0].keys()
    assert len(also_logged) == len(logged)
    for ours, theirs in zip(also_logged, logged, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6, abs=1e-9)


@pytest.fixture(scope="module", autouse=True)
def _less_to_collect() -> Iterator[None]:
    """Recorded graphs are garbage in circles: what was there before them need not be looked through again and again."""
    gc.collect()
    gc.freeze()
    yield
    gc.unfreeze()


@pytest.fixture(scope="module")
def compiled(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture(autouse=True)
def _compile_once(compiled: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LIGHTNING_FED_CACHE", str(compiled))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of clients in each call of C code."""
    seen: list[int] = []
    call = Steps.__call__

    def counted(self: Steps, client: Sequence[Tensor], *rest: Any) -> list[Tensor]:
        seen.append(len(client[0]))
        return call(self, client, *rest)

    monkeypatch.setattr(Steps, "__call__", counted)
    return seen


@each_budget
@every_algorithm
def test_every_algorithm_gives_the_same_numbers(algorithm: Algorithm, budget: dict[str, Any]) -> None:
    assert_agree(algorithm, **budget)


@needs_compiler
@each_budget
@pytest.mark.parametrize("algorithm", [FedADMM(eta=0.5), FedAvg(), Scaffold()], ids=name_of)
def test_clients_with_full_batches_are_trained_in_c(
    algorithm: Algorithm, budget: dict[str, Any], calls: list[int]
) -> None:
    assert_agree(algorithm, True, **budget)
    assert calls.count(sum(n >= BATCH for n in SIZES)) >= 2  # in every round


@each_budget
@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (FedADMM(eta=0.5), {"momentum": 0.9}),
        (FedAvg(), {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
        (FedDyn(alpha=0.5), {"weight_decay": 0.01}),
        (FedDR(eta_hat=2.0), {"optimizer": torch.optim.Adam}),
        (FedADMM(eta=0.5), {"optimizer": torch.optim.Adam, "weight_decay": 0.01}),
        (FedProx(mu=0.1, stragglers=0.5), {"optimizer": torch.optim.Adam}),
    ],
    ids=["momentum", "nesterov, decay", "decay", "Adam", "Adam, decay", "Adam, stragglers"],
)
def test_optimisers_with_memory_give_the_same_numbers(
    algorithm: Algorithm, model: dict[str, Any], budget: dict[str, Any]
) -> None:
    """A client that waits has no step of its optimiser either."""
    assert_agree(algorithm, model=model, **budget)


@each_way
@each_budget
def test_stacks_cut_into_blocks_give_the_same_numbers(
    budget: dict[str, Any], compile_: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 4)
    monkeypatch.setattr("lightning_fed.local.stacked.batches.BLOCK_BYTES", 1000)
    assert_agree(FedADMM(eta=0.5), compile_, **budget)


def test_blocks_of_optimisers_with_memory_give_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 4)
    monkeypatch.setattr("lightning_fed.local.stacked.batches.BLOCK_BYTES", 1000)
    assert_agree(FedAvg(), model={"momentum": 0.9}, local_epochs=2)


@each_way
@each_budget
def test_a_few_clients_in_every_round_give_the_same_numbers(budget: dict[str, Any], compile_: bool) -> None:
    assert_agree(FedADMM(eta=0.5), compile_, clients_per_round=3, rounds=4, **budget)


@each_way
def test_cohorts_of_any_size_give_the_same_numbers(compile_: bool) -> None:
    assert_agree(FedDR(eta_hat=2.0), compile_, sampler=Bernoulli(0.4), rounds=5, local_epochs=1)


@each_way
@pytest.mark.parametrize(
    "options",
    [
        {"local_epochs": 2, "trainer": {"limit_train_batches": 3}},
        {"local_epochs": 2, "trainer": {"gradient_clip_val": 0.05}},
        {"local_steps": 5, "trainer": {"overfit_batches": 1}},
    ],
    ids=["few batches", "clipped", "always the same"],
)
def test_settings_of_the_trainer_give_the_same_numbers(options: dict[str, Any], compile_: bool) -> None:
    assert_agree(FedADMM(eta=0.5), compile_, **options)


@pytest.mark.parametrize(
    ("algorithm", "model"),
    [
        (FedADMM(eta=0.5), {}),
        (FedADMM(eta=0.5), {"momentum": 0.9}),
        (FedMid(g=L1(0.1)), {}),
        (FedDualAvg(g=L1(0.1)), {}),
    ],
    ids=["plain", "momentum", "mapped after steps", "mapped before gradients"],
)
def test_stacks_filled_up_with_copies_give_the_same_numbers(algorithm: Algorithm, model: dict[str, Any]) -> None:
    """Stacks of 17 clients are filled up."""
    assert_agree(algorithm, model=model, local_epochs=1, data={"sizes": (8, 5, 10) * 5 + (5, 12)})


@each_way
@pytest.mark.parametrize(("clients_per_round", "rounds"), [(None, 3), (2, 6)], ids=["everybody", "two in a round"])
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    clients_per_round: int | None, rounds: int, compile_: bool, tmp_path: Path
) -> None:
    options = {"engine": "vectorized", "compile": compile_, "clients_per_round": clients_per_round, "local_epochs": 1}

    def saving() -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}

    done, last = rounds // 2, tmp_path / "last.ckpt"
    straight, logged = fit(FedADMM(eta=0.5), rounds=rounds, **options)
    fit(FedADMM(eta=0.5), rounds=done, trainer=saving(), **options)
    resumed, also_logged = fit(FedADMM(eta=0.5), rounds=rounds, trainer=saving(), checkpoint=last, **options)
    assert resumed.keys() == straight.keys()
    assert [name for name, value in straight.items() if not torch.equal(resumed[name], value)] == []
    assert also_logged == logged[done:]
