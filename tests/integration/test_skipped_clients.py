"""A client that fails is left out on both sides: the run has the bits of one that never drew it."""

from __future__ import annotations

import os
import signal
import time
import warnings
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import pytorch_lightning as pl
import torch
from helpers.modules import Net, classification, quiet_trainer, x_of
from helpers.problems import MEANS
from helpers.reuse import assert_same
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg, FedDRII, FedDyn, FedPD, FedSplit, Scaffold
from lightning_fed.callbacks import Dropouts, FederatedCallback
from lightning_fed.core import FailurePolicy, Retry
from lightning_fed.core.randomness import derive_seed
from lightning_fed.engines import ClientError, DistanceError, DivergenceError, TimeLimitError
from lightning_fed.engines.failed_clients import TooFewClientsError
from lightning_fed.sampling import Sampler, Uniform

ROUNDS, BAD = 3, "c1"
ENGINES: dict[str, dict[str, Any]] = {
    "one by one": {"engine": "sequential"},
    "workers": {"engine": "sequential", "workers": 2},
    "stacked": {"engine": "vectorized", "compile": False},
    "in C": {"engine": "vectorized", "compile": True},
}
#: What a bad client is, the policy that finds it out, the error without skip, and the kind that is reported.
KINDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "raises": ({}, ClientError, "raised"),
    "nan": ({}, DivergenceError, "not finite"),
    "inf": ({}, DivergenceError, "not finite"),
    "far": ({"max_distance": 0.4}, DistanceError, "too far"),
    "slow": ({"max_seconds": 0.2}, TimeLimitError, "too slow"),
}
CASES = [(kind, way) for kind in KINDS for way in ENGINES if kind != "slow" or way in ("one by one", "workers")]


class Plain(Net):
    """A step without surprises, apart from clients whose data are slow."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.hparams.get("slow") and bool((batch[0] == 77).any()):
            time.sleep(0.3)
        return torch.nn.functional.nll_loss(self(batch[0]).log_softmax(1), batch[1])


class Slow(Plain):
    def __init__(self) -> None:
        super().__init__()
        self.hparams["slow"] = True


def data_with(kind: str | None, clients: tuple[str, ...] = (BAD,)) -> FederatedDataModule:
    """A federation in which some clients are bad; with equal batches, so that clients may be stacked."""
    data = classification(4, drop_last=True)
    data.setup("fit")
    for cid in clients if kind else ():
        x, y = data.client_dataset(cid).tensors
        if kind == "raises":
            y.fill_(99)
        elif kind == "far":
            x.mul_(100)
        else:
            x.fill_({"nan": float("nan"), "inf": float("inf"), "slow": 77.0}[kind])
    return data


@dataclass(frozen=True)
class Without(Sampler):
    """Everybody but some."""

    away: tuple[int, ...] = (1,)

    def draw(self, n: int, rng: np.random.Generator) -> list[int]:
        return [i for i in range(n) if i not in self.away]

    def inclusion_probabilities(self, n: int) -> Any:
        return np.ones(n)


class Reports(FederatedCallback):
    reads_module = False

    def __init__(self) -> None:
        self.all: list[Any] = []
        self.logged: list[dict[str, float]] = []

    def on_round_end(self, trainer: pl.Trainer, module: pl.LightningModule, report: Any) -> None:
        self.all.append(report)

    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        self.logged.append({k: float(v) for k, v in trainer.callback_metrics.items() if k.startswith("train")})


def server_of(policy: Any = "raise", algorithm: Any = None, **kwargs: Any) -> FederatedServer:
    settings = {"local_steps": 3, "seed": 4, "evaluate_every": 0, "figure": False, **kwargs}
    return FederatedServer(algorithm or FedADMM(eta=0.5), on_client_error=policy, **settings)


def fit(server: FederatedServer, data: FederatedDataModule, module: Any = None, **kwargs: Any) -> tuple[Any, Reports]:
    module, reports = module or Plain(), Reports()
    callbacks = [reports, *kwargs.pop("callbacks", [])]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "Left out|Client .* failed in all|The loss of client")
        quiet_trainer(server, kwargs.pop("rounds", ROUNDS), callbacks=callbacks, **kwargs).fit(module, datamodule=data)
    return module, reports


def memory_of(server: FederatedServer) -> dict[str, Tensor]:
    """What the server and those clients that took part remember."""
    federation = server.federation
    found = {f"server.{name}": value for name, value in vars(federation.server).items()}
    found |= {f"buffers.{name}": value for name, value in federation.buffers.items()}
    for cid in federation.store:
        if federation.store[cid].visits:
            found |= {f"{cid}.{name}": value for name, value in vars(federation.store[cid].state).items()}
    return found


def assert_mean_of_shares(server: FederatedServer) -> None:
    federation = server.federation
    name = next(name for name in MEANS if hasattr(federation.server, name))
    weights, states = federation.weights, {cid: federation.recall(cid) for cid in federation.client_ids}
    mean = sum(weights[cid] * getattr(states[cid], MEANS[name]).double() for cid in weights) / sum(weights.values())
    torch.testing.assert_close(getattr(federation.server, name), mean, rtol=0, atol=1e-6)


@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_a_skipped_client_leaves_the_bits_of_a_run_that_never_drew_it(kind: str, engine: str) -> None:
    bounds, _, reported = KINDS[kind]
    make = Slow if kind == "slow" else Plain
    server = server_of(FailurePolicy("skip", **bounds), **ENGINES[engine])
    module, reports = fit(server, data_with(kind), make())
    never = server_of(sampler=Without())
    expected, _ = fit(never, data_with(kind), make())
    assert torch.equal(x_of(module), x_of(expected))  # a stack with a bad client is trained one by one
    assert_same(memory_of(server), memory_of(never))
    assert_mean_of_shares(server)
    assert torch.equal(server.federation.recall(BAD).x_i, server.federation.x0)
    for k, report in enumerate(reports.all):
        assert {cid: failure.kind for cid, failure in report.failures.items()} == {BAD: reported}
        assert report.failures[BAD].reason.startswith(f"round {k}, client 'c1': ")
        assert report.metrics["failed_clients"] == 1
        assert report.metrics["clients"] == 3


@pytest.mark.parametrize(("kind", "engine"), CASES)
def test_without_skip_a_failure_ends_the_fit(kind: str, engine: str) -> None:
    bounds, error, _ = KINDS[kind]
    server = server_of(FailurePolicy(**bounds), **ENGINES[engine])
    with pytest.raises(ClientError, match=r"round 0, client 'c1': ") as caught:
        fit(server, data_with(kind), Slow() if kind == "slow" else Plain())
    assert caught.type is error
    assert server.rounds_done == 0


@pytest.mark.parametrize("engine", ENGINES)
def test_a_lenient_policy_changes_nothing_where_nobody_fails(engine: str) -> None:
    results = []
    for policy in ("raise", "skip", Retry(2)):
        server = server_of(policy, **ENGINES[engine])
        results.append((x_of(fit(server, data_with(None))[0]), memory_of(server)))
    for x, memory in results[1:]:
        assert torch.equal(x, results[0][0])
        assert_same(memory, results[0][1])


def test_each_client_and_kind_is_told_once() -> None:
    server = server_of("skip")
    with pytest.warns(UserWarning, match="Left out: round 0, client 'c1': IndexError") as told:
        quiet_trainer(server, 2).fit(Plain(), datamodule=data_with("raises"))
    assert len([each for each in told if "Left out" in str(each.message)]) == 1


TRIES: dict[str, int] = {}


class Flaky(Plain):
    """The first visits of one client raise in the middle, whatever the round."""

    fails = 1

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if batch_idx == 1 and bool((batch[1] == 2).all()):
            TRIES["n"] = TRIES.get("n", 0) + 1
            if TRIES["n"] <= self.fails:
                raise OSError("the data server is away")
        return loss


def flaky_data() -> FederatedDataModule:
    data = classification(4, drop_last=True)
    data.setup("fit")
    data.client_dataset(BAD).tensors[1].fill_(2)
    for cid in ("c0", "c2", "c3"):
        data.client_dataset(cid).tensors[1].clamp_(max=1)
    return data


@pytest.mark.parametrize("engine", ["one by one", "workers"])
@pytest.mark.parametrize("policy", [Retry(2), FailurePolicy("raise", retries=2)], ids=["skip", "raise"])
def test_a_retry_that_succeeds_leaves_no_trace(policy: Any, engine: str) -> None:
    TRIES.clear()
    server = server_of(policy, **ENGINES[engine])
    module, reports = fit(server, flaky_data(), Flaky(), rounds=1)
    TRIES["n"] = 100
    whole = server_of()
    expected, _ = fit(whole, flaky_data(), Flaky(), rounds=1)
    assert torch.equal(x_of(module), x_of(expected))
    assert_same(memory_of(server), memory_of(whole))
    assert not reports.all[0].failures


def test_a_client_that_exhausts_its_retries_is_skipped() -> None:
    class Worse(Flaky):
        fails = 3

    TRIES.clear()
    _, reports = fit(server_of(Retry(2)), flaky_data(), Worse(), rounds=2)
    assert [set(report.failures) for report in reports.all] == [{BAD}, set()]
    assert TRIES["n"] == 4


class Logs(Net):
    """Logs numbers and a metric object, has BatchNorm, and fails in the middle of a bad client's visit."""

    def __init__(self) -> None:
        super().__init__(norm=True, dropout=0.2, optimizer="momentum", scheduler="step")
        self.accuracy = MulticlassAccuracy(3)
        self.seen: list[int] = []

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        x, y = batch
        self.seen.append(len(y))
        self.accuracy.update(self(x), y.clamp(max=2))
        self.log("train_metric", self.accuracy, on_step=False, on_epoch=True)
        loss = super().training_step([x, y.clamp(max=2)], batch_idx)
        if batch_idx == 1 and int(y.max()) == 99:
            raise ZeroDivisionError("no luck")
        return loss


@pytest.mark.parametrize("engine", ["one by one", "workers"])
@pytest.mark.parametrize("buffers", ["average", "local"])
def test_what_a_failed_visit_did_and_logged_is_undone(engine: str, buffers: Any) -> None:
    server = server_of("skip", buffers=buffers, **ENGINES[engine])
    module, reports = fit(server, data_with("raises"), Logs())
    never = server_of(sampler=Without(), buffers=buffers, **ENGINES[engine])
    expected, others = fit(never, data_with("raises"), Logs())
    assert_same(module.state_dict(), expected.state_dict())
    assert_same(memory_of(server), memory_of(never))
    assert module.seen == expected.seen
    assert reports.logged == others.logged


class Dies(Plain):
    """The process of the bad client is killed, as the kernel does where memory runs out."""

    parent = os.getpid()

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if int(batch[1].max()) == 99 and os.getpid() != self.parent:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().training_step(batch, batch_idx)


def test_a_worker_that_dies_costs_its_client_only() -> None:
    server = server_of("skip", **ENGINES["workers"])
    module, reports = fit(server, data_with("raises", ("c0",)), Dies(), rounds=1)
    never = server_of(sampler=Without(away=(0,)))
    expected, _ = fit(never, data_with("raises", ("c0",)), rounds=1)
    assert torch.equal(x_of(module), x_of(expected))
    assert "its process died" in reports.all[0].failures["c0"].reason


class LateFailure(Net):
    """Data-independent gradients succeed, local steps of the bad client do not."""

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        if self.training and int(batch[1].max()) == 99:
            raise ZeroDivisionError("no luck")
        return torch.nn.functional.nll_loss(self(batch[0]).log_softmax(1), batch[1].clamp(max=2))


@pytest.mark.parametrize("algorithm", [FedDRII(eta_hat=2.0, mode="upload_first"), FedDRII()], ids=str)
def test_a_failure_in_the_second_exchange_undoes_the_first(algorithm: Any) -> None:
    server, never = server_of("skip", algorithm), server_of("raise", algorithm, sampler=Without())
    module, _ = fit(server, data_with("raises"), LateFailure())
    expected, _ = fit(never, data_with("raises"), LateFailure())
    assert torch.equal(x_of(module), x_of(expected))
    assert_same(memory_of(server), memory_of(never))


@pytest.mark.parametrize("algorithm", [FedAvg(), FedDyn(), Scaffold()], ids=lambda a: type(a).__name__)
def test_other_algorithms_skip_too(algorithm: Any) -> None:
    server, never = server_of("skip", algorithm), server_of("raise", algorithm, sampler=Without())
    module, _ = fit(server, data_with("nan"))
    expected, _ = fit(never, data_with("nan"))
    assert torch.equal(x_of(module), x_of(expected))
    if not isinstance(algorithm, FedAvg):
        assert_mean_of_shares(server)


@pytest.mark.parametrize("algorithm", [FedSplit(), FedPD()], ids=lambda a: type(a).__name__)
@pytest.mark.parametrize("policy", ["skip", Retry(1)], ids=str)
def test_algorithms_that_need_everybody_refuse_to_skip(algorithm: Any, policy: Any) -> None:
    with pytest.raises(ValueError, match="needs every client in every round"):
        FederatedServer(algorithm, on_client_error=policy)
    FederatedServer(algorithm, on_client_error=FailurePolicy("raise", retries=2))


# -- too few clients ---------------------------------------------------------------------------------------------


def test_short_of_min_clients_another_cohort_is_drawn() -> None:
    policy = FailurePolicy("skip", min_clients=2, attempts=50)
    server = server_of(policy, sampler=Uniform(2))
    module, reports = fit(server, data_with("raises", ("c0", "c1")), rounds=4)
    ids, repeated = server.federation.client_ids, 0
    for k, report in enumerate(reports.all):
        seed = derive_seed(4, report.attempts - 1, "attempt") if report.attempts > 1 else 4
        assert report.cohort == [ids[i] for i in Uniform(2).cohort(4, seed, k)] == ["c2", "c3"]
        repeated += report.attempts > 1
    assert repeated
    again, _ = fit(server_of(policy, sampler=Uniform(2)), data_with("raises", ("c0", "c1")), rounds=4)
    assert torch.equal(x_of(module), x_of(again))
    never, _ = fit(server_of(sampler=Without(away=(0, 1))), data_with("raises", ("c0", "c1")), rounds=4)
    assert torch.equal(x_of(module), x_of(never))


def test_what_an_attempt_logged_is_forgotten() -> None:
    policy, bad = FailurePolicy("skip", min_clients=2, attempts=50), ("c0", "c1")
    _, reports = fit(server_of(policy, sampler=Uniform(2)), data_with("raises", bad), Logs(), rounds=4)
    _, others = fit(server_of(sampler=Without(away=(0, 1))), data_with("raises", bad), Logs(), rounds=4)
    assert any(report.attempts > 1 for report in reports.all)
    assert reports.logged == others.logged


@pytest.mark.parametrize("engine", ENGINES)
def test_a_round_without_a_single_reply_is_an_error_and_not_committed(engine: str) -> None:
    server, first = server_of("skip", **ENGINES[engine]), x_of(Plain())
    module = Plain()
    with pytest.raises(TooFewClientsError, match=r"4 failed.*min_clients is 1.*client 'c0': .*tried with 3 cohorts"):
        fit(server, data_with("nan", ("c0", "c1", "c2", "c3")), module)
    assert server.rounds_done == len(server.federation.store) == 0
    assert torch.equal(x_of(module), first)


# -- resume ------------------------------------------------------------------------------------------------------


def test_a_resume_in_the_middle_has_the_same_bits() -> None:
    def saving() -> Any:
        return ModelCheckpoint(dirpath="kept", save_top_k=-1, filename="{epoch}")

    policy = FailurePolicy("skip", min_clients=2, attempts=50)
    away = Dropouts(rate=0.3, seed=5)
    make = lambda: server_of(policy, clients_per_round=3)  # noqa: E731
    kwargs: dict[str, Any] = {"callbacks": [away, saving()], "enable_checkpointing": True}
    straight = make()
    expected, _ = fit(straight, data_with("raises"), Logs(), rounds=6, **kwargs)
    server, module, reports = make(), Logs(), Reports()
    trainer = quiet_trainer(server, 6, callbacks=[reports, away, saving()], enable_checkpointing=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(module, datamodule=data_with("raises"), ckpt_path="kept/epoch=2.ckpt")
    assert [report.round for report in reports.all] == [3, 4, 5]
    assert_same(module.state_dict(), expected.state_dict())
    assert_same(memory_of(server), memory_of(straight))
    assert server._player.failed.in_a_row == straight._player.failed.in_a_row
    assert straight._player.failed.in_a_row[BAD] >= 3


# -- dropouts ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("engine", ENGINES)
def test_dropouts_are_clients_that_were_never_drawn(engine: str) -> None:
    server = server_of("skip", **ENGINES[engine])
    module, reports = fit(server, data_with(None), callbacks=[Dropouts(rate={BAD: 1.0})])
    never = server_of(sampler=Without(), **ENGINES[engine])
    expected, _ = fit(never, data_with(None))
    assert torch.equal(x_of(module), x_of(expected))
    assert_same(memory_of(server), memory_of(never))
    assert [report.failures[BAD].kind for report in reports.all] == ["dropped out"] * ROUNDS
    assert server.federation.store.summary(BAD) is None or server.federation.store.summary(BAD).cost.bytes_down == 0


def test_dropouts_follow_rate_trace_and_rounds() -> None:
    half = Dropouts(rate=0.5, first=100, last=299)
    drawn = [half.is_away(k, "c0", seed=1) for k in range(400)]
    assert not any(drawn[:100] + drawn[300:])
    assert 70 < sum(drawn) < 130
    assert drawn == [half.is_away(k, "c0", seed=1) for k in range(400)]
    assert drawn != [half.is_away(k, "c1", seed=1) for k in range(400)]
    _, reports = fit(server_of("skip"), data_with(None), callbacks=[Dropouts(trace={1: ["c0", "c2"]})])
    assert [sorted(report.failures) for report in reports.all] == [[], ["c0", "c2"], []]


def test_dropouts_need_a_policy() -> None:
    with pytest.raises(ClientError, match="round 0, client 'c1': Dropouts has it drop out"):
        fit(server_of(), data_with(None), callbacks=[Dropouts(rate=1.0, clients=[BAD])])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": 1.5}, "probability"),
        ({"rate": {"c0": -1.0}}, "probability"),
        ({"rate": {"c0": 0.1}, "clients": ["c0"]}, "names clients already"),
        ({"first": -1}, "first"),
        ({"first": 3, "last": 2}, "last"),
        ({"trace": {-1: ["c0"]}}, "trace"),
    ],
)
def test_bad_dropouts_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Dropouts(**wrong)


@pytest.mark.parametrize(
    "wrong",
    [
        {"action": "ignore"},
        {"retries": -1},
        {"min_clients": 0},
        {"attempts": 0},
        {"max_distance": 0.0},
        {"max_seconds": -1.0},
    ],
)
def test_bad_policies_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(wrong))):
        FailurePolicy(**wrong)
    with pytest.raises(ValueError, match="on_client_error"):
        FederatedServer(FedADMM(), on_client_error="ignore")  # type: ignore[arg-type]


def test_clients_with_a_time_limit_are_not_stacked() -> None:
    policy = FailurePolicy("skip", max_seconds=60.0)
    with pytest.raises(ValueError, match=r"vectorized.*impossible here: visits have a time limit"):
        fit(server_of(policy, engine="vectorized"), data_with(None))
    fit(server_of(policy, engine="auto"), data_with(None))
