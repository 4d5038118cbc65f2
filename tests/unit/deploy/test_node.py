"""A node refuses what it should not do; the server applies nothing that it should not."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federation import Wire, close_nodes, deployed, link_of, node, nodes

from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.core.records import record
from lightning_fed.deploy import relay
from lightning_fed.deploy.blanks import rebuilt
from lightning_fed.deploy.frames import Frame, FrameError, encode
from lightning_fed.deploy.keys import Key
from lightning_fed.deploy.link import Link, Patience, RefusedError
from lightning_fed.deploy.messages import Answer, Asked, Envelope, Instruction, Visited
from lightning_fed.deploy.node import BrokenError
from lightning_fed.deploy.worker import serve
from lightning_fed.engines.sequential import ClientError, DivergenceError, TimeLimitError

SETTINGS: dict[str, Any] = {"algorithm": FedADMM(eta=1.0), "local_steps": 2, "seed": 0}


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_nodes()


def answered(frame: bytes) -> dict[str, Any]:
    return Frame.open(frame).header


def changed(frame: bytes, **header: Any) -> bytes:
    opened = Frame.open(frame)
    return encode({**opened.header, **header}, opened.tensors(opened.schema))


def test_a_replayed_instruction_is_refused(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))
    deployed(wire, 1, **SETTINGS)
    whose, frame = wire.sent[-1]
    answer = answered(wire.nodes_by_id[whose].follow(frame))
    assert answer["kind"] == "refused"
    assert "followed already" in answer["reason"]


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"settings": {}}, "algorithm is"),
        ({"settings": None}, "names no settings"),
        ({"clients": [["stranger", [-1] * 4, [-1] * 4, 0]]}, "not one of this node's"),
        ({"clients": [["c0", [9, 9, 0, 0], [9, 9, 0, 0], 0]]}, "this node has"),
        ({"clients": 3}, "cannot be read"),
        ({"numbers": {}}, "cannot be read"),
        ({"kind": "install"}, "no instructions of kind 'install'"),
    ],
    ids=lambda change: str(change)[:40],
)
def test_an_instruction_that_does_not_fit_is_refused_with_its_reason(change: Any, reason: str, tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))
    deployed(wire, 1, **SETTINGS)
    frame = next(frame for whose, frame in wire.sent if whose == 0 and answered(frame)["kind"] == "train")
    answer = answered(wire.nodes_by_id[0].follow(changed(frame, key=[2, 1, 0, 0], **change)))
    assert answer["kind"] == "refused"
    assert reason in answer["reason"]


def test_a_model_of_another_size_is_refused(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))
    deployed(wire, 1, **SETTINGS)
    opened = Frame.open(wire.sent[-1][1])
    tensors = {**opened.tensors(opened.schema), "down/x_bar": torch.zeros(99)}
    answer = answered(wire.nodes_by_id[1].follow(encode({**opened.header, "key": [2, 1, 0, 0]}, tensors)))
    assert "down/x_bar is declared as float32 (99,)" in answer["reason"]


def test_noise_is_no_instruction(tmp_path: Path) -> None:
    with pytest.raises(FrameError):
        node(tmp_path, ["c0"], **SETTINGS).follow(b"noise" * 100)


def test_other_settings_on_a_node_end_the_run_with_the_difference(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **{**SETTINGS, "local_steps": 3}))
    with pytest.raises(RefusedError, match="local_steps is 3 on this node, and 2 on the server"):
        deployed(wire, 1, **SETTINGS)


@pytest.mark.filterwarnings("ignore:Left out")
def test_clients_that_do_not_answer_count_as_failed_after_the_patience(tmp_path: Path) -> None:
    for action, error in (("raise", TimeLimitError), ("skip", None)):
        settings = {**SETTINGS, "on_client_error": action}
        wire = Wire(nodes(tmp_path / action, **settings))
        wire.before = lambda whose, frame: None if whose and answered(frame)["kind"] == "train" else frame
        link = link_of(wire, patience=Patience(0.05, 0.2, 0.01))
        if error is None:
            report = deployed(wire, 1, link, **settings).report
            assert report is not None
            assert sorted(report.failures) == sorted(wire.nodes_by_id[1].clients)
        else:
            with pytest.raises(error, match=r"node 1 has not answered in 0\.2 s"):
                deployed(wire, 1, link, **settings)


def test_the_server_tells_once_in_an_exchange_for_which_nodes_it_waits(tmp_path: Path) -> None:
    wire, told = Wire(nodes(tmp_path, **SETTINGS)), list[Any]()

    def before(whose: int, frame: bytes) -> bytes | None:
        header = answered(frame)
        return None if whose == 1 and header["kind"] == "train" and header["key"][3] < 3 else frame

    wire.before = before
    link = link_of(wire)
    link.tell = lambda round, missing: told.append((round, list(missing)))
    deployed(wire, 2, link, **SETTINGS)
    assert told == [(0, [1]), (1, [1])]


def test_a_node_that_never_answers_the_roll_call_is_named_by_its_client(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))
    wire.before = lambda whose, frame: None
    with pytest.raises(ClientError, match="roll call for client 'c0'"):
        deployed(wire, 1, link_of(wire, patience=Patience(0.05, 0.1, 0.01)), **SETTINGS)


def test_a_message_that_is_not_finite_is_a_failure_on_the_server_too(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))

    def after(whose: int, answer: bytes) -> bytes:
        opened = Frame.open(answer)
        tensors = {name: own * torch.nan if "message" in name else own for name, own in _all(opened).items()}
        return encode(opened.header, tensors)

    wire.after = after
    with pytest.raises(DivergenceError, match="its message is not finite"):
        deployed(wire, 1, **SETTINGS)


def _all(frame: Frame) -> dict[str, Any]:
    return frame.tensors(frame.schema)


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_failure_leaves_the_node_without_its_reason(tmp_path: Path) -> None:
    settings = {**SETTINGS, "algorithm": FedAvg(), "on_client_error": "skip"}
    wire = Wire(nodes(tmp_path, **settings))

    def explode(batch: Any) -> None:
        raise RuntimeError("the patient's name is in the trace")

    wire.nodes_by_id[0].module.training_step = explode  # type: ignore[method-assign]
    report = deployed(wire, 1, **settings).report
    assert report is not None
    assert sorted(report.failures) == sorted(wire.nodes_by_id[0].clients)
    assert not any(b"patient" in answer for _, answer in wire.answers)


class Forger:
    """Answers in the place of a node."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer

    def nodes(self) -> set[int]:
        return {7}

    def exchange(self, frames: Any, timeout: float) -> Any:
        for whose, frame in frames.items():
            opened = Frame.open(frame)
            good = Answer("run", Key.read(opened.header["key"]), "roll", opened.digest, [Visited("ann")])
            yield whose, self.answer(good).encode()


@pytest.mark.parametrize(
    "change",
    [{"run": "other"}, {"key": Key(0, 0, 0, 0)}, {"of": "0" * 64}, {"visited": [Visited("bob")]}, {"visited": []}],
    ids=str,
)
def test_an_answer_to_anything_else_is_not_applied(change: dict[str, Any]) -> None:
    def asked(forger: Forger) -> dict[Any, Any]:
        link = Link(forger, {"ann": 7}, "run", 1, Patience(0.05, 0.05, 0.01))  # type: ignore[arg-type]
        ann = Asked("ann", Key(-1, -1, -1, -1), Key(-1, -1, -1, -1), 0)
        return link.ask(["ann"], (0, 0), lambda n, c, k: Instruction(Envelope("run", k, "roll"), {}, [ann]), {}, {})

    assert set(asked(Forger(lambda good: good))) == {7}
    assert asked(Forger(lambda good: replace(good, **change))) == {}


def test_headers_hold_plain_values_only(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))
    deployed(wire, 1, **SETTINGS)
    for _, frame in [*wire.sent, *wire.answers]:
        json.dumps(answered(frame), allow_nan=True)


@pytest.mark.parametrize(
    "numbers", [{"steps": -1}, {"steps": float("nan")}, {"optimizer_steps": 10**400}, {"gradients": 0.5}], ids=str
)
def test_counts_that_are_none_are_not_applied(numbers: dict[str, Any], tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))

    def after(node: int, answer: bytes) -> bytes:
        opened = Frame.open(answer)
        if node or opened.header["kind"] != "train" or opened.header["key"][3]:
            return answer
        visited = [[cid, why, {**own, **numbers}, plain] for cid, why, own, plain in opened.header["visited"]]
        return encode({**opened.header, "visited": visited}, _all(opened))

    wire.after = after
    deployed(wire, 1, **SETTINGS)  # the node is asked again
    asked = [Frame.open(frame).header for whose, frame in wire.sent if whose == 0]
    assert [own["key"][3] for own in asked if own["kind"] == "train"] == [0, 1]


def test_a_record_of_another_type_is_refused() -> None:
    @record
    class Message:
        x: torch.Tensor
        first: bool = True

    with pytest.raises(FrameError, match=r"Message.first must be a bool, got \[1\]"):
        rebuilt(Message(torch.zeros(1)), {"x": torch.ones(1)}, {"first": [1]})


@pytest.mark.filterwarnings("ignore:Left out")
def test_a_node_whose_own_code_fails_says_so_ends_and_is_started_anew(tmp_path: Path) -> None:
    settings = {**SETTINGS, "algorithm": FedAvg(), "on_client_error": "skip"}
    wire = Wire(nodes(tmp_path, **settings))

    def explode() -> None:
        raise OSError("the patient's file is gone")

    broken = wire.nodes_by_id[0]
    follow, ended = broken.follow, list[BrokenError]()

    def noting(frame: bytes) -> bytes:
        try:
            return follow(frame)
        except BrokenError as error:
            ended.append(error)
            return error.answer

    broken.follow = noting  # type: ignore[method-assign]
    broken.module.configure_optimizers = explode  # type: ignore[method-assign]
    report = deployed(wire, 1, **settings).report
    assert report is not None
    assert sorted(report.failures) == sorted(broken.clients)
    assert len(ended) == 1
    assert not any(b"patient" in answer for _, answer in wire.answers)


def test_a_worker_ends_after_it_has_sent_that_it_is_broken() -> None:
    ours, theirs = socket.socketpair()

    class Listening:
        def accept(self) -> tuple[socket.socket, None]:
            return theirs, None

    def follow(frame: bytes) -> bytes:
        raise BrokenError(b"failed: " + frame)

    with ours:
        relay.send(ours, b"visit")
        with pytest.raises(BrokenError):
            serve(Listening(), follow)  # type: ignore[arg-type]
        assert relay.receive(ours) == b"failed: visit"


def test_a_damaged_state_is_refused_and_never_taken_for_a_fresh_one(tmp_path: Path) -> None:
    wire = Wire(nodes(tmp_path, **SETTINGS))
    server = deployed(wire, 1, **SETTINGS)
    for each in wire.nodes_by_id.values():
        each.close()
    paths = [path for path in tmp_path.rglob("*") if path.is_file() and "records" in str(path.parent)]
    assert paths
    for path in paths:
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 1
        path.write_bytes(bytes(content))
    assert server.federation is not None
    clients = wire.nodes_by_id[0].clients
    memory = server.federation.store.get(clients[0])
    assert memory is not None
    version = list(memory.state.name)
    frame = next(frame for whose, frame in wire.sent if whose == 0 and answered(frame)["kind"] == "train")
    opened = Frame.open(frame)
    tensors = {name: own for name, own in _all(opened).items() if name != "x0"}
    header = {**opened.header, "key": [2, 1, 0, 0], "clients": [[cid, version, version, 0] for cid in clients]}
    answer = answered(node(tmp_path / "node0", clients, **SETTINGS).follow(encode(header, tensors)))
    assert answer["kind"] == "refused"
    assert "damaged" in answer["reason"]
