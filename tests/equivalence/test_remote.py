"""A federation over a wire has the bits of its simulation, whatever is lost on the way."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.federation import Wire, close_nodes, deployed, link_of, nodes, same, simulated
from helpers.problems import every_algorithm, name_of

from lightning_fed.algorithms import Compressed, FedADMM, FedAvg, FedDyn, FedPAQ, FedPrimalDual, Scaffold
from lightning_fed.deploy.frames import Frame
from lightning_fed.deploy.journal import Journal
from lightning_fed.deploy.journalling import Journalling
from lightning_fed.deploy.keys import Key
from lightning_fed.transforms import Quantize, TopK

#: Settings by which a message, or what becomes of it, is another than in the list of all algorithms.
OTHERS = [
    FedADMM(eta="auto"),
    FedADMM(eta="auto", mean="active"),
    FedAvg(stragglers=0.5),
    FedPAQ(stragglers=0.4),
    Compressed(FedADMM(eta=1.0), TopK(2)),
    Compressed(FedPrimalDual(), Quantize()),
    Compressed(Scaffold(), Quantize()),
    Compressed(FedAvg(), TopK(2), feedback=True),
]
WORK: dict[str, Any] = {"local_steps": 3, "seed": 3}
SOME: dict[str, Any] = {**WORK, "clients_per_round": 3}


@pytest.fixture(autouse=True)
def _close() -> Iterator[None]:
    yield
    close_nodes()


@every_algorithm
def test_clients_on_nodes_give_the_bits_of_the_simulation(algorithm: Any, tmp_path: Path) -> None:
    settings = {"algorithm": algorithm, **(WORK if algorithm.traits.everybody else SOME)}
    wire = Wire(nodes(tmp_path, **settings))
    assert same(simulated(4, **settings), deployed(wire, 4, **settings))


@pytest.mark.parametrize("algorithm", OTHERS, ids=name_of)
def test_messages_that_are_changed_or_lost_on_purpose_give_the_bits_too(algorithm: Any, tmp_path: Path) -> None:
    settings = {"algorithm": algorithm, **SOME}
    wire = Wire(nodes(tmp_path, **settings))
    assert same(simulated(4, **settings), deployed(wire, 4, **settings))


@pytest.mark.parametrize("kept", [{"buffers": "local"}, {"buffers": "server"}, {"personal": "layer.bias"}], ids=str)
def test_what_clients_keep_to_themselves_stays_on_their_nodes(kept: dict[str, Any], tmp_path: Path) -> None:
    settings = {"algorithm": FedADMM(eta=1.0, mean="active"), **SOME, "local_steps": None, "local_epochs": 2, **kept}
    wire = Wire(nodes(tmp_path, **settings))
    assert same(simulated(4, **settings), deployed(wire, 4, **settings))
    sent = {name for _, answer in wire.answers for name in Frame.open(answer).schema}
    assert not any("layer" in name for name in sent)
    assert any("shared" in name for name in sent) == ("buffers" not in kept)


def test_answers_that_are_lost_after_the_node_has_committed_change_no_bit(tmp_path: Path) -> None:
    settings = {"algorithm": Scaffold(), **SOME}
    wire, lost = Wire(nodes(tmp_path, **settings)), []

    def after(node: int, answer: bytes) -> bytes | None:
        key = Key.read(Frame.open(answer).header["key"])
        if key.round in (1, 2) and key.attempt == 0:
            lost.append(key)
            return None
        return answer

    wire.after = after
    assert same(simulated(4, **settings), deployed(wire, 4, **settings))
    assert {key.round for key in lost} == {1, 2}


def test_an_answer_that_comes_again_or_late_is_not_applied(tmp_path: Path) -> None:
    settings = {"algorithm": FedADMM(eta=1.0), **SOME}
    wire, seen = Wire(nodes(tmp_path, **settings)), list[tuple[int, bytes]]()

    def after(node: int, answer: bytes) -> bytes | None:
        key, kind = Key.read(Frame.open(answer).header["key"]), Frame.open(answer).header["kind"]
        if kind == "train" and key.round == 2 and key.attempt == 0:  # the answer of an earlier round in its place
            return next(old for whose, old in seen if whose == node)
        if kind == "train":
            seen.append((node, answer))
        return answer

    wire.after = after
    assert same(simulated(4, **settings), deployed(wire, 4, **settings))


def test_a_server_that_ends_between_any_two_steps_resumes_to_the_same_bits(tmp_path: Path) -> None:
    settings = {"algorithm": FedDyn(alpha=0.5), **SOME}
    wire, server = Wire(nodes(tmp_path, **settings)), None
    for end_at in (1, 2, None):  # the server is gone after nodes have committed this round, and before itself

        def after(node: int, answer: bytes, end_at: int | None = end_at) -> bytes | None:
            if Frame.open(answer).header["key"][1] == end_at:
                raise ConnectionAbortedError
            return answer

        wire.after = after
        with Journal(tmp_path / "journal") as journal:
            link = link_of(wire, journal.incarnation)
            journalling = Journalling(journal, None)  # type: ignore[arg-type]

            def run(link: Any = link, journalling: Any = journalling, journal: Any = journal) -> Any:
                return deployed_with(journalling, wire, link, journal.last, settings)

            if end_at is None:
                server = run()
            else:
                with pytest.raises(ConnectionAbortedError):
                    run()
    assert server is not None
    assert same(simulated(4, **settings), server)


def deployed_with(journalling: Journalling, wire: Wire, link: Any, ckpt: Any, settings: dict[str, Any]) -> Any:
    """Deploy with a journal, whose callback is told of its server when the fit is set up."""

    class Telling(Journalling):
        def setup(self, trainer: Any, pl_module: Any, stage: str) -> None:
            self.server = next(callback for callback in trainer.callbacks if hasattr(callback, "link"))

    return deployed(wire, 4, link, (Telling(journalling.journal, journalling.server),), ckpt, **settings)


def test_a_node_that_starts_again_goes_on_from_its_folder(tmp_path: Path) -> None:
    settings = {"algorithm": FedADMM(eta=1.0), **SOME}
    wire, count = Wire(nodes(tmp_path, **settings)), 0

    def before(node: int, frame: bytes) -> bytes | None:
        nonlocal count
        count += 1
        wire.nodes_by_id[node].close()
        wire.nodes_by_id[node] = nodes(tmp_path, **settings)[node]  # a new process would know as little
        return frame

    wire.before = before
    assert same(simulated(3, **settings), deployed(wire, 3, **settings))
    assert count > 3


def test_losses_and_metrics_leave_a_node_only_if_it_shares_them(tmp_path: Path) -> None:
    settings = {"algorithm": FedAvg(), **WORK}
    for share, wanted in (((), set()), (("loss",), {"local_loss"}), (("train_error",), {"clients/train_error"})):
        wire = Wire(nodes(tmp_path / "-".join(share), share=share, **settings))
        server = deployed(wire, 1, **settings)
        assert server.report is not None
        found = {name for name, value in server.report.metrics.items() if torch.tensor(value).isfinite()}
        assert {"local_loss", "clients/train_error"} & found == wanted
