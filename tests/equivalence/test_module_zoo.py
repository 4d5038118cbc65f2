"""Modules as people write them train in a federation as a plain Trainer per client would train them."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.modules import quiet_trainer
from helpers.reuse import alone as alone_of
from helpers.zoo import ZOO
from helpers.zoo.base import Entry, Tiny
from helpers.zoo.clocks import CLOCKS
from helpers.zoo.oracle import SEED, State, alone, federate, state_of
from helpers.zoo.runs import COHORTS, Fixed, attributes_of, federated, run, same
from helpers.zoo.state import STATE, ClampsAtEpochEnd
from pytorch_lightning.callbacks import ModelCheckpoint

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedAvg

TRAINED = [entry for entry in ZOO if entry.refused is None]
SHARED = [entry for entry in TRAINED if entry.single is None]
REFUSED = [entry for entry in ZOO if entry.refused is not None]
STACKABLE = [entry for entry in TRAINED if getattr(entry.make(), "stackable", False)]
#: One in four, for laws that `make quick` need not try on all.
SOME = TRAINED[::4]
MOVING = [
    entry
    for entry in TRAINED
    if entry.name.startswith(("BatchNorm", "momentum encoder", "MoCo", "DINO", "SWA copy, by batch", "frozen backbone"))
]


def name_of(entry: Entry) -> str:
    return re.sub(r"[^\w=]+", "-", entry.name).strip("-")


def every(entries: list[Entry], quick: list[Entry] | None = None) -> Any:
    """Every entry; of those that are not ``quick``, if that is given, `make quick` tries none."""
    marks = {entry.name: [] if quick is None or entry in quick else [pytest.mark.slow] for entry in entries}
    named = [pytest.param(entry, id=name_of(entry), marks=marks[entry.name]) for entry in entries]
    return pytest.mark.parametrize("entry", named, scope="module")  # sorts tests by entry, whose runs they share


def assert_close(found: State, expected: State, tolerance: float = 1e-12) -> None:
    assert found.keys() == expected.keys()
    unlike = {
        name: float((found[name].double() - expected[name].double()).abs().max())
        for name in expected
        if not torch.allclose(found[name].double(), expected[name].double(), rtol=tolerance, atol=tolerance)
    }
    assert not unlike


@every([entry for entry in [*STATE, *CLOCKS] if entry.refused is None and entry.dropped is None], quick=SOME)
def test_the_oracle_is_one_trainer_where_there_is_one_client(entry: Entry) -> None:
    """None of our training is in here: Lightning resumed at every epoch against Lightning that never stopped."""
    assert_close(federate(entry, ((2,),) * 3).rounds[-1], alone(entry, entry.data(), "c", 3))


@every(TRAINED)
def test_a_federation_is_a_plain_trainer_per_client_and_a_mean(entry: Entry) -> None:
    oracle, found = federate(entry, COHORTS), run(entry)
    begin = oracle.visits[0, "a"]
    assert any(not torch.equal(oracle.rounds[0][name], begin[name]) for name in oracle.trained), "everybody is alike"
    for (k, cid), end in oracle.visits.items():
        assert_close(found.visits[k, cid], end)
        assert k or same(found.visits[k, cid], end), "the first visits begin alike, and must end alike to the bit"
    for state, expected in zip(found.rounds, oracle.rounds, strict=True):
        assert_close(state, expected)


@every([entry for entry in TRAINED if not entry.ends_rounds])
def test_what_nobody_moves_keeps_its_bits(entry: Entry) -> None:
    oracle, first = federate(entry, COHORTS), state_of(entry.make())
    ends = [end for (k, _), end in oracle.visits.items() if k == 0]
    still = [
        name
        for name, tensor in first.items()
        if name not in oracle.trained and all(torch.equal(end[name], tensor) for end in ends)
    ]
    found = run(entry).rounds[0]
    assert [name for name in still if not torch.equal(found[name], first[name])] == []


@pytest.mark.parametrize("policy", ["server", "local"])
@every(MOVING)
def test_what_is_not_trained_follows_the_policy(entry: Entry, policy: str) -> None:
    oracle, found = federate(entry, COHORTS, policy), run(entry, buffers=policy)
    for visit, end in oracle.visits.items():
        assert_close(found.visits[visit], end)
    assert_close(found.state, oracle.rounds[-1])


def fit(entry: Entry, policy: str, *callbacks: Any, **kwargs: Any) -> tuple[FederatedServer, State]:
    server = FederatedServer(
        FedAvg(), sampler=Fixed(COHORTS), local_steps=entry.steps, seed=SEED, buffers=policy, figure=False
    )
    trainer = quiet_trainer(server, len(COHORTS), callbacks=list(callbacks), enable_checkpointing=bool(callbacks))
    trainer.fit(module := entry.make(), datamodule=entry.data(), **kwargs)
    return server, state_of(module)


@pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`")
@pytest.mark.parametrize("policy", ["average", "server", "local"])
@every(MOVING)
def test_what_moves_is_resumed_to_the_bit(entry: Entry, policy: str, tmp_path: Path) -> None:
    _, whole = fit(entry, policy, ModelCheckpoint(tmp_path, "{epoch}", save_top_k=-1))
    _, resumed = fit(entry, policy, ckpt_path=tmp_path / "epoch=0.ckpt")
    assert same(resumed, whole)


@every([entry for entry in MOVING if "momentum" in entry.name])
def test_clients_store_what_moved_and_nothing_else(entry: Entry) -> None:
    server, _ = fit(entry, "local")
    for cid in ("a", "b", "c"):
        stored = set(server.federation.store[cid].buffers)
        assert stored == {name for name in state_of(entry.make()) if name.startswith("target.")}


@every(TRAINED, quick=SOME)
def test_a_lone_client_is_a_plain_trainer(entry: Entry) -> None:
    rounds = 1 if entry.dropped else 3
    expected = alone(entry, entry.data(), "c", rounds)
    found = federated(entry, [[0]] * rounds, alone_of(entry.data(), "c"))
    assert_close(found.state, expected)


@every(TRAINED, quick=STACKABLE)  # auto trains all others one by one
def test_auto_is_sequential(entry: Entry) -> None:
    auto, expected = run(entry, engine="auto"), run(entry)
    assert_close(auto.state, expected.state, 1e-10)
    assert auto.logged == pytest.approx(expected.logged, rel=1e-6)
    assert same(auto.attributes, expected.attributes)


@pytest.mark.slow
@every(SHARED)
def test_workers_are_sequential_and_warn_as_one_process_does(entry: Entry) -> None:
    shared, expected = run(entry, workers=2), run(entry)
    assert same(shared.state, expected.state)
    assert same(shared.replies, expected.replies)
    assert shared.logged == pytest.approx(expected.logged, rel=1e-6)
    assert same(shared.attributes, expected.attributes)
    assert_warned(entry, shared.warned)


@every(TRAINED, quick=SOME)
def test_a_reply_does_not_depend_on_earlier_visits(entry: Entry) -> None:
    forwards, backwards = run(entry, COHORTS[:1]), run(entry, ((2, 1, 0),))
    assert list(forwards.visits) == list(reversed(backwards.visits))
    for visit in forwards.visits:
        assert same(forwards.replies[visit], backwards.replies[visit])
        assert same(forwards.visits[visit], backwards.visits[visit])


@every(TRAINED, quick=SOME)
def test_evaluation_leaves_no_trace(entry: Entry) -> None:
    with_it, without = run(entry, evaluate_every=1), run(entry)
    assert with_it.traces == []
    assert same(with_it.rounds, without.rounds)
    assert same(with_it.attributes, without.attributes)
    own = {name: value for name, value in with_it.logged.items() if not name.startswith("federated/")}
    assert same(own, {name: value for name, value in without.logged.items() if not name.startswith("federated/")})


@every([entry for entry in TRAINED if entry.single is not None])
def test_what_cannot_be_shared_is_refused(entry: Entry) -> None:
    with pytest.raises(ValueError, match=entry.single):
        federated(entry, workers=2)


@every(TRAINED)
def test_one_warning_names_what_is_lost_and_there_are_no_others(entry: Entry) -> None:
    assert_warned(entry, run(entry).warned)


def assert_warned(entry: Entry, warned: list[str]) -> None:
    found = list(warned)
    if entry.dropped is not None:
        mine = [text for text in found if re.search(f"Training changes the attribute {entry.dropped}", text)]
        assert len(mine) == 1, found
        assert "register_buffer" in mine[0]
        found.remove(mine[0])
    if entry.uncopyable is not None:
        mine = [text for text in found if re.search(f"attribute {entry.uncopyable} cannot be copied", text)]
        assert len(mine) == 1, found
        found.remove(mine[0])
    others = [f"Training changes the attribute {name}" for name in entry.also_dropped]
    assert [text for text in found if not any(other in text for other in others)] == []


@every([entry for entry in TRAINED if entry.dropped is not None])
def test_a_dropped_attribute_is_afterwards_what_it_was(entry: Entry) -> None:
    name, module = str(entry.dropped).split(" of ")[0], entry.make()
    module.configure_optimizers()
    first = {key: value for key, value in attributes_of(module).items() if key.split(".")[-1] == name}
    assert len(first) == 1
    found = run(entry).attributes
    assert same({key: found[key] for key in first}, first)


def test_a_clamp_that_changes_nothing_is_not_refused() -> None:
    class Wide(ClampsAtEpochEnd):
        limit = 100.0

    trained, plain = (federated(Entry("", kind)) for kind in (Wide, Tiny))
    assert same(trained.rounds, plain.rounds)


@pytest.mark.parametrize("settings", [{}, {"engine": "auto"}, {"workers": 2}, {"evaluate_every": 1}], ids=repr)
@every(REFUSED)
def test_a_trained_parameter_that_changes_between_visits_is_refused(entry: Entry, settings: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"Parameter {entry.refused} was changed outside a client's visit") as refusal:
        federated(entry, **settings)
    assert "Box" in str(refusal.value)
    assert "on_train_batch_end" in str(refusal.value)
