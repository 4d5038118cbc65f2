"""Clients trained side by side: frozen weights, blocks, C code, compilers that fail, and runs that are resumed.

That they end where clients trained one by one end is the matter of test_engines.py.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.c_steps import needs_compiler
from helpers.engines import WAYS, Row, row_named, run
from helpers.engines.base import Logged
from helpers.engines.settings import BATCH, SIZES, Regression, uneven
from helpers.marks import quick_first
from helpers.modules import Net, classification, quiet_trainer
from helpers.stacks import TOLERANCE, Smooth, data, fit, memories
from pytorch_lightning.callbacks import ModelCheckpoint
from pytorch_lightning.plugins import Precision
from torch import Tensor, nn

from lightning_fed import FederatedServer
from lightning_fed.algorithms import FedADMM, FedAvg
from lightning_fed.local.native.codegen.operators import EVERY
from lightning_fed.local.stacked.problem import Answers, StackedProblem
from lightning_fed.local.stacked.solver import StackedLocal


def test_frozen_parameters_are_shared_and_stay() -> None:
    class Frozen(Smooth):
        def configure_optimizers(self) -> Any:
            self.net[0].requires_grad_(False)
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    _, trainer = fit("vectorized", FedADMM(), Frozen(), rounds=1)
    assert torch.equal(trainer.lightning_module.net[0].weight, Frozen().net[0].weight)


def test_a_compiler_that_fails_or_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one, _ = fit("sequential", FedADMM(), Smooth(), rounds=1)

    def refuses(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    def errs(step: Any, *_: Any) -> Any:
        return lambda client, *_: [client[0] + 1e-3]

    for compiler in (refuses, errs):
        monkeypatch.setattr("lightning_fed.local.stacked.recorder.Steps", compiler)
        stacked, _ = fit("vectorized", FedADMM(), Smooth(), rounds=1, compile=True)
        x_bar = one_by_one.federation.server.x_bar
        assert torch.allclose(stacked.federation.server.x_bar, x_bar, rtol=0, atol=TOLERANCE)


TAKING_PART = [
    pytest.param(None, 3, id="everybody"),
    pytest.param(2, 6, id="two in a round", marks=pytest.mark.slow),
]


@pytest.mark.parametrize("way", ["recorded", pytest.param("in C", marks=needs_compiler)])
@pytest.mark.parametrize(("clients_per_round", "rounds"), TAKING_PART)
def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(
    clients_per_round: int | None, rounds: int, way: str, tmp_path: Path
) -> None:
    def fitted(rounds: int, saves: bool = True, **kwargs: Any) -> tuple[dict[str, Tensor], list[dict[str, float]]]:
        options = {"local_epochs": 1, "seed": 3, "evaluate_every": 0, **WAYS[way]}
        server, logged = FederatedServer(FedADMM(eta=0.5), clients_per_round=clients_per_round, **options), Logged()
        callbacks = [logged, *([ModelCheckpoint(tmp_path, save_last=True)] if saves else [])]
        trainer = quiet_trainer(server, rounds, callbacks=callbacks, enable_checkpointing=saves)
        trainer.fit(Regression(), datamodule=uneven(), **kwargs)
        return memories(server), logged.rounds

    done = rounds // 2
    straight, logged = fitted(rounds, saves=False)
    fitted(done)
    resumed, also_logged = fitted(rounds, ckpt_path=tmp_path / "last.ckpt")
    assert resumed.keys() == straight.keys()
    assert [name for name, value in straight.items() if not torch.equal(resumed[name], value)] == []
    assert also_logged == logged[done:]


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_in_place_touch_neither_questions_nor_earlier_answers(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Smooth(optimizer=optimizer)
    seen: list[tuple[Tensor | None, Tensor]] = []

    def watched(local: StackedLocal, questions: StackedProblem, plans: Any) -> Answers:
        given = [questions.start, questions.constant]
        before = [None if part is None else part.clone() for part in given]
        answers = solve(local, questions, plans)
        seen.extend((part, kept) for part, kept in zip(given, before, strict=True) if kept is not None)
        seen.append((answers.x, answers.x.clone()))
        return answers

    solve = StackedLocal.solve
    monkeypatch.setattr(StackedLocal, "solve", watched)
    fit("vectorized", FedADMM(eta=0.5), module)
    assert len(seen) == 9
    for tensor, kept in seen:
        torch.testing.assert_close(tensor, kept, rtol=0, atol=0)


def test_auto_leaves_clients_one_by_one_whose_batches_all_have_sizes_of_their_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Declared(Smooth):
        stackable = True

    monkeypatch.setattr("helpers.stacks.data", lambda: data(batch_size=100))
    fit("auto", FedADMM(), Declared())
    assert any("most batches have sizes that few others have" in text for text in caplog.messages)


class Threefold(Precision):
    def backward(self, tensor: Tensor, *args: Any, **kwargs: Any) -> None:
        super().backward(tensor * 3, *args, **kwargs)


def test_a_precision_of_the_users_own_goes_through_lightning() -> None:
    own = Row("precision of the user's own", Net, data=classification, trainer={"plugins": [Threefold()]})
    expected, found, plain = run(own, "lightning"), run(own, "lean"), run(Row("", Net, data=classification), "lean")
    assert torch.equal(found.memory["server.0"], expected.memory["server.0"])
    assert not torch.allclose(found.memory["server.0"], plain.memory["server.0"])


class Halved(Net):
    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1]) * torch.tensor(0.1)


def test_a_step_that_makes_tensors_makes_them_in_the_precision_of_the_run() -> None:
    row = Row("", Halved, data=classification, trainer={"precision": "64-true"}, options={"local_steps": 20})
    expected, found = run(row, "lean").memory["server.0"], run(row, "recorded").memory["server.0"]
    assert expected.dtype == torch.float64
    assert torch.allclose(found, expected, rtol=0, atol=1e-14)


# In C.


@needs_compiler
@pytest.mark.parametrize("name", quick_first(["FedADMM(eta=0.5)", "FedDR()", "FedAvg()"]))
def test_plain_steps_are_written_in_c(name: str) -> None:
    """Once for the comparison, and once in every round."""
    assert run(row_named(f"network, {name}"), "in C").calls.count(3) >= 3


@needs_compiler
@pytest.mark.parametrize("budget", ["steps", "epochs"])
@pytest.mark.parametrize("name", quick_first(["FedADMM(eta=0.5)", "FedAvg()", "Scaffold()"]))
def test_clients_with_full_batches_are_trained_in_c(name: str, budget: str) -> None:
    calls = run(row_named(f"linear, {budget}, everybody, {name}"), "in C").calls
    assert calls.count(sum(n >= BATCH for n in SIZES)) >= 2  # in every round


@needs_compiler
def test_workers_are_threads_and_change_no_bit() -> None:
    first, second = (run(Row("", Smooth, FedADMM(), options={"workers": workers}), "in C") for workers in (1, 2))
    assert first.calls
    assert second.calls
    assert all(torch.equal(second.memory[name], value) for name, value in first.memory.items())


@needs_compiler
def test_blocks_follow_each_other() -> None:
    assert len(run(row_named("network, small blocks"), "in C").calls) > 9


@needs_compiler
def test_what_cannot_be_written_in_c_is_said() -> None:
    told = run(row_named("sorting, for which there is no C"), "in C").told
    assert any(
        "Local steps do not run in C, but as recorded: NoCodeError: there is no C code for aten.sort" in text
        for text in told
    )
    assert "Local steps run in C." not in told


@needs_compiler
def test_steps_that_run_in_c_are_said_to() -> None:
    told = run(row_named("network, FedAvg()"), "in C").told
    assert "Clients are trained side by side." in told
    assert told.count("Local steps run in C.") == 1


def test_without_a_compiler_it_is_said_what_runs_in_its_place(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    monkeypatch.delenv("CC", raising=False)
    found = run.__wrapped__(row_named("network, FedAvg()"), "in C")
    assert found.told == [
        "Clients are trained side by side, with recorded steps, not in C: no C compiler was found"
        " (of $CC, cc, gcc and clang)."
    ]
    assert not found.calls


def test_an_optimiser_without_c_code_is_said() -> None:
    told = run(row_named("linear, epochs, Adam"), "in C").told
    assert [text for text in told if "not in C: Adam, as it is set, is not plain SGD" in text]
    assert "Local steps run in C." not in told


@needs_compiler
def test_code_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(EVERY, torch.ops.aten.exp, "FN(exp)({0}) + 1e-3")
    monkeypatch.setattr("torch._inductor.compile", lambda *_: None)
    row = Row("", Smooth, FedAvg(), row_named("network, FedAvg()").data)
    expected, found = run(row, "lean").memory, run(row, "in C")
    assert len(found.calls) == 1  # the comparison
    assert all(torch.allclose(found.memory[name], expected[name], rtol=0, atol=TOLERANCE) for name in expected)
