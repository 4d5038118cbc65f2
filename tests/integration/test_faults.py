"""Failures that ``Faults`` injects: each kind under each policy, in every engine, in a full start, in a resumed run."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import pytorch_lightning as pl
import torch
from helpers.failing import (
    BAD,
    ENGINES,
    ROUNDS,
    Plain,
    Reports,
    Without,
    assert_mean_of_shares,
    data_with,
    fit,
    memory_of,
    server_of,
)
from helpers.modules import quiet_trainer, x_of
from helpers.reuse import assert_same
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed.algorithms import FedADMM, FedAvg, FedDR, FedDyn, FedLin, Scaffold
from lightning_fed.callbacks import Faults, FederatedCallback
from lightning_fed.core import FailurePolicy, Fault
from lightning_fed.engines import ClientError, DistanceError, DivergenceError, TimeLimitError
from lightning_fed.engines.failed_clients import TooFewClientsError

LIMITS: dict[str, Any] = {"max_distance": 20.0, "max_seconds": 60.0}
STACKABLE = {"max_distance": 20.0}
#: By name: how a client fails, the error under ``raise``, and how often ``Retry(2)`` visits it in a round.
KINDS: dict[str, tuple[dict[str, Any], type[Exception], int]] = {
    "dropped out": ({}, ClientError, 0),
    "raised": ({}, ClientError, 3),
    "not finite": ({}, DivergenceError, 1),
    "infinite": ({"kind": "not finite", "size": math.inf}, DivergenceError, 1),
    "too far": ({}, DistanceError, 1),
    "too slow": ({}, TimeLimitError, 3),
}
POLICIES: dict[str, dict[str, Any]] = {
    "raise": {"action": "raise"},
    "raise after retries": {"action": "raise", "retries": 2},
    "skip": {"action": "skip"},
    "Retry": {"action": "skip", "retries": 2},
}


def faults(kind: str, **how: Any) -> Faults:
    return Faults(**{"kind": kind, "rate": 1.0, "clients": [BAD], **KINDS[kind][0], **how})


class Starts(FederatedCallback):
    """Notes the client of every visit, retries included, and the model at the beginning of a round."""

    reads_module = False

    def __init__(self) -> None:
        self.clients: list[Any] = []

    def on_client_start(self, trainer: pl.Trainer, module: pl.LightningModule, visit: Any) -> None:
        self.clients.append(visit.client)

    def on_round_start(self, trainer: pl.Trainer, module: pl.LightningModule, round: int, cohort: list[Any]) -> None:
        self.x_bar = x_of(module).clone()


@pytest.fixture(scope="module")
def never() -> Any:
    """The end of a run that never draws the bad client."""
    server = server_of(sampler=Without())
    return x_of(fit(server, data_with(None))[0]), memory_of(server)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("kind", KINDS)
def test_the_invariant_holds_for_each_kind_and_policy(kind: str, policy: str, never: Any) -> None:
    server, starts = server_of(FailurePolicy(**POLICIES[policy], **LIMITS)), Starts()
    skips = POLICIES[policy]["action"] == "skip"
    module, callbacks = Plain(), [faults(kind, first=0 if skips else 1), starts]
    if skips:
        module, reports = fit(server, data_with(None), module, callbacks=callbacks)
        assert torch.equal(x_of(module), never[0])
        assert_same(memory_of(server), never[1])
        reported = KINDS[kind][0].get("kind", kind)
        assert [{cid: f.kind for cid, f in each.failures.items()} for each in reports.all] == [{BAD: reported}] * ROUNDS
        assert all(each.failures[BAD].injected for each in reports.all)
    else:
        with pytest.raises(ClientError, match=r"round 1, client 'c1': ") as caught:
            fit(server, data_with(None), module, callbacks=callbacks)
        assert caught.type is KINDS[kind][1]
        assert server.rounds_done == 1
        assert torch.equal(x_of(module), server.federation.server.x_bar)
    assert_mean_of_shares(server)
    visits = KINDS[kind][2] if "retries" in POLICIES[policy] else min(1, KINDS[kind][2])
    assert starts.clients.count(BAD) == (visits * ROUNDS if skips else 1 + visits)


CASES = [(kind, way) for kind in KINDS for way in ENGINES if kind != "too slow" or way == "workers"]


@pytest.mark.parametrize(("kind", "engine"), [(kind, way) for kind, way in CASES if way != "one by one"])
def test_every_engine_has_the_same_faults(kind: str, engine: str, never: Any) -> None:
    stacks = engine in ("stacked", "in C")
    server = server_of(FailurePolicy("skip", **STACKABLE if stacks else LIMITS), **ENGINES[engine])
    module, reports = fit(server, data_with(None), callbacks=[faults(kind)])
    if kind == "dropped out" and stacks:  # the stack goes on without it
        torch.testing.assert_close(x_of(module), never[0], rtol=0, atol=1e-6)
    else:
        assert torch.equal(x_of(module), never[0])
        assert_same(memory_of(server), never[1])
    assert [list(each.failures) for each in reports.all] == [[BAD]] * ROUNDS
    assert_mean_of_shares(server)


ALGORITHMS = [FedADMM(eta=0.5), FedADMM(eta=0.5, mean="active"), FedDR(), FedDyn(), Scaffold(), FedAvg()]


@pytest.mark.parametrize("algorithm", ALGORITHMS, ids=str)
@pytest.mark.parametrize("engine", ["one by one", "stacked"])
def test_a_client_that_diverges_unnoticed_keeps_its_share_consistent(algorithm: Any, engine: str) -> None:
    """Without a bound, a client far away is believed: state and message both follow its model."""
    server = server_of("skip", algorithm, **ENGINES[engine])
    before = x_of(Plain())
    _, reports = fit(server, data_with(None), callbacks=[faults("too far", size=50.0)], rounds=1)
    assert not reports.all[0].failures
    if not isinstance(algorithm, FedAvg):
        assert_mean_of_shares(server)
    if isinstance(algorithm, FedDR):
        torch.testing.assert_close((server.federation.recall(BAD).x_i - before).norm(), torch.tensor(50.0))


def test_injected_failures_are_not_warned_of(recwarn: Any) -> None:
    quiet_trainer(server_of("skip"), 2, callbacks=[faults("raised")]).fit(Plain(), datamodule=data_with(None))
    assert not [each for each in recwarn if "Left out" in str(each.message)]


def test_a_resumed_run_has_the_same_faults() -> None:
    def callbacks(reports: Reports) -> list[Any]:
        drawn = [Faults(kind, rate=0.2, seed=2) for kind in ("raised", "not finite", "too far", "dropped out")]
        return [reports, *drawn, ModelCheckpoint(dirpath="kept", save_top_k=-1, filename="{epoch}")]

    def run(rounds: int, ckpt_path: str | None) -> tuple[Any, Any, Reports]:
        server, module, reports = server_of(FailurePolicy("skip", attempts=50, **STACKABLE)), Plain(), Reports()
        trainer = quiet_trainer(server, rounds, callbacks=callbacks(reports), enable_checkpointing=True)
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "Checkpoint directory|Client .* failed in all")
            trainer.fit(module, datamodule=data_with(None), ckpt_path=ckpt_path)
        return module, server, reports

    whole, straight, all_of_it = run(6, None)
    module, server, rest = run(6, "kept/epoch=2.ckpt")
    assert [each.failures for each in rest.all] == [each.failures for each in all_of_it.all[3:]]
    assert {failure.kind for each in all_of_it.all for failure in each.failures.values()} >= {"raised", "not finite"}
    assert_same(module.state_dict(), whole.state_dict())
    assert_same(memory_of(server), memory_of(straight))


# -- the full start ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", ["raised", "not finite", "dropped out"])
def test_a_client_that_fails_in_a_full_start_begins_with_the_state_of_round_0(kind: str) -> None:
    """It begins as in FedDR(init="x0"), with x_i = y_i = x0, whenever its first visit is."""
    algorithm, trap = FedDR(eta_hat=0.5, init="prox"), faults(kind, first=-1, last=-1)
    server, first = server_of("skip", algorithm, sampler=Without()), x_of(Plain())
    _, reports = fit(server, data_with(None), callbacks=[trap], rounds=1)
    unvisited = server.federation.recall(BAD)
    assert torch.equal(unvisited.x_i, first)
    assert torch.equal(unvisited.y_i, first)
    assert_mean_of_shares(server)
    assert reports.all[0].failures[BAD].reason.startswith("full start, client 'c1': ")
    assert reports.all[0].metrics["failed_clients"] == 1
    assert server._player.failed.in_a_row == {BAD: 1}

    server, starts = server_of("skip", algorithm), Starts()
    fit(server, data_with(None), callbacks=[trap, starts], rounds=1)
    assert starts.x_bar.ne(first).any()  # the others have done their part
    torch.testing.assert_close(server.federation.recall(BAD).y_i, first + algorithm.alpha * (starts.x_bar - first))
    assert_mean_of_shares(server)
    assert server._player.failed.in_a_row == {}


@pytest.mark.parametrize("algorithm", [FedDR(init="prox"), FedLin()], ids=["FedDR", "FedLin"])
def test_a_full_start_that_fails_is_rolled_back_and_begins_again(algorithm: Any) -> None:
    server, module = server_of("raise", algorithm), Plain()
    first = x_of(module).clone()
    trap = faults("dropped out", first=-1, last=-1)
    trainer = quiet_trainer(server, 2, callbacks=[trap])
    with pytest.raises(ClientError, match="full start, client 'c1': Faults has it drop out"):
        trainer.fit(module, datamodule=data_with(None))
    assert not server.federation.started
    assert len(server.federation.store) == 0
    assert torch.equal(x_of(module), first)
    trap.rate = 0.0
    trainer.fit(module, datamodule=data_with(None))
    straight = server_of("raise", algorithm)
    expected, _ = fit(straight, data_with(None), rounds=2)
    assert_same(module.state_dict(), expected.state_dict())
    assert_same(memory_of(server), memory_of(straight))


def test_a_full_start_without_enough_clients_is_an_error() -> None:
    server = server_of(FailurePolicy("skip", min_clients=4), FedDR(init="prox"))
    with pytest.raises(TooFewClientsError, match="full start: 3 clients to go on with, 1 failed, and min_clients is 4"):
        fit(server, data_with(None), callbacks=[faults("raised", first=-1, last=-1)])
    assert not server.federation.started
    assert len(server.federation.store) == 0


# -- the object --------------------------------------------------------------------------------------------------


def test_a_trainer_without_a_server_has_no_faults() -> None:
    trainer = pl.Trainer(
        callbacks=[faults("too slow")],
        fast_dev_run=1,
        accelerator="cpu",
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Plain(), datamodule=data_with(None))
    assert trainer.global_step == 1


def test_kinds_are_drawn_apart() -> None:
    kinds = [Faults(kind, rate=0.5, size=1.0 if kind == "too far" else None) for kind in ("raised", "too far")]
    drawn = [[each.fails(k, "c0", seed=1) for k in range(100)] for each in kinds]
    assert drawn[0] != drawn[1]
    assert all(30 < sum(each) < 70 for each in drawn)


def test_a_callback_of_your_own_decides() -> None:
    class Mine(FederatedCallback):
        reads_module = False

        def fault(self, trainer: Any, module: Any, round: int, client: Any) -> Fault | None:
            return Fault("raised") if (round, client) == (1, "c2") else None

    _, reports = fit(server_of("skip"), data_with(None), callbacks=[Mine()])
    assert [list(each.failures) for each in reports.all] == [[], ["c2"], []]
    assert "Mine has its training raise" in reports.all[1].failures["c2"].reason


@pytest.mark.parametrize(
    ("kind", "name", "how"),
    [("too far", "max_distance", {}), ("too slow", "max_seconds", {}), ("too slow", "max_seconds", {"size": 5.0})],
)
def test_a_fault_that_no_limit_finds_out_is_refused_before_round_0(kind: str, name: str, how: Any) -> None:
    server = server_of("skip")
    with pytest.raises(ValueError, match=rf'Faults\("{kind}"\) needs a limit.*{name}'):
        fit(server, data_with(None), callbacks=[Faults(kind, rate=0.1, **how)])  # type: ignore[arg-type]
    assert server.federation is None


@pytest.mark.parametrize("engine", ENGINES)
def test_dropouts_are_clients_that_were_never_drawn(engine: str) -> None:
    server = server_of("skip", **ENGINES[engine])
    module, reports = fit(server, data_with(None), callbacks=[Faults(rate={BAD: 1.0})])
    never = server_of(sampler=Without(), **ENGINES[engine])
    expected, _ = fit(never, data_with(None))
    assert torch.equal(x_of(module), x_of(expected))
    assert_same(memory_of(server), memory_of(never))
    assert [report.failures[BAD].kind for report in reports.all] == ["dropped out"] * ROUNDS
    assert server.federation.store.summary(BAD) is None or server.federation.store.summary(BAD).cost.bytes_down == 0


def test_dropouts_follow_rate_trace_and_rounds() -> None:
    half = Faults(rate=0.5, first=100, last=299)
    drawn = [half.fails(k, "c0", seed=1) for k in range(400)]
    assert not any(drawn[:100] + drawn[300:])
    assert 70 < sum(drawn) < 130
    assert drawn == [half.fails(k, "c0", seed=1) for k in range(400)]
    assert drawn != [half.fails(k, "c1", seed=1) for k in range(400)]
    _, reports = fit(server_of("skip"), data_with(None), callbacks=[Faults(trace={1: ["c0", "c2"]})])
    assert [sorted(report.failures) for report in reports.all] == [[], ["c0", "c2"], []]


def test_dropouts_need_a_policy() -> None:
    with pytest.raises(ClientError, match="round 0, client 'c1': Faults has it drop out"):
        fit(server_of(), data_with(None), callbacks=[Faults(rate=1.0, clients=[BAD])])


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"rate": 1.5}, "probability"),
        ({"rate": {"c0": -1.0}}, "probability"),
        ({"rate": {"c0": 0.1}, "clients": ["c0"]}, "names clients already"),
        ({"first": -2}, "first"),
        ({"first": 3, "last": 2}, "last"),
        ({"trace": {-2: ["c0"]}}, "trace"),
        ({"kind": "asleep"}, "kind"),
        ({"kind": "raised", "size": 1.0}, "no meaning"),
        ({"kind": "not finite", "size": 1.0}, "nan, inf"),
        ({"kind": "too far", "size": -1.0}, "positive"),
    ],
)
def test_bad_faults_are_refused(wrong: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        Faults(**wrong)
