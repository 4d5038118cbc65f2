"""A client that fails is left out on both sides: the run has the bits of one that never drew it."""

from __future__ import annotations

import os
import signal
import warnings
from typing import Any

import pytest
import torch
from helpers.failing import (
    BAD,
    ENGINES,
    Plain,
    Reports,
    Slow,
    Without,
    assert_mean_of_shares,
    data_with,
    fit,
    memory_of,
    server_of,
)
from helpers.modules import Net, classification, quiet_trainer, x_of
from helpers.reuse import assert_same
from pytorch_lightning.callbacks import ModelCheckpoint
from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy

from lightning_fed import FederatedDataModule, FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg, FedDRII, FedDyn, FedPD, FedSplit, Scaffold
from lightning_fed.callbacks import Faults
from lightning_fed.core import FailurePolicy, Retry
from lightning_fed.core.randomness import derive_seed
from lightning_fed.engines import ClientError, DistanceError, DivergenceError, TimeLimitError
from lightning_fed.engines.failed_clients import TooFewClientsError
from lightning_fed.sampling import Uniform

#: What a bad client is, the policy that finds it out, the error without skip, and the kind that is reported.
KINDS: dict[str, tuple[dict[str, Any], type[Exception], str]] = {
    "raises": ({}, ClientError, "raised"),
    "nan": ({}, DivergenceError, "not finite"),
    "inf": ({}, DivergenceError, "not finite"),
    "far": ({"max_distance": 0.4}, DistanceError, "too far"),
    "slow": ({"max_seconds": 0.2}, TimeLimitError, "too slow"),
}
CASES = [(kind, way) for kind in KINDS for way in ENGINES if kind != "slow" or way in ("one by one", "workers")]


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
    away = Faults(rate=0.3, seed=5)
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


# -- policies -----------------------------------------------------------------------------------------------------


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
