"""Clients trained side by side end where clients trained one by one end."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from modules import quiet_trainer
from problems import every_algorithm
from pytorch_lightning.callbacks import ModelCheckpoint
from stacks import TOLERANCE, Smooth, assert_engines_agree, data, fit, memories
from torch import Tensor

from lightning_fed import FederatedServer
from lightning_fed.algorithms import Algorithm, Compressed, FedADMM, FedPAQ, FedProx
from lightning_fed.callbacks import FederatedCallback
from lightning_fed.local.stacked.problem import Answers, StackedProblem
from lightning_fed.local.stacked.solver import StackedLocal
from lightning_fed.sampling import Bernoulli
from lightning_fed.transforms import TopK


@every_algorithm
def test_every_algorithm_gives_the_same_numbers(algorithm: Algorithm) -> None:
    everybody = algorithm.everybody
    assert_engines_agree(algorithm, clients_per_round=None if everybody else 3)


@pytest.mark.parametrize(
    "algorithm",
    [FedProx(mu=0.3, stragglers=0.7), Compressed(FedADMM(eta=1.0), TopK(20)), FedPAQ(levels=4)],
    ids=lambda algorithm: type(algorithm).__name__,
)
def test_algorithms_with_draws_of_their_own_give_the_same_numbers(algorithm: Algorithm) -> None:
    assert_engines_agree(algorithm, clients_per_round=4)


@pytest.mark.parametrize("optimizer", ["momentum", "adam"])
@pytest.mark.parametrize("clip", [{}, {"gradient_clip_val": 0.1}])
def test_elementwise_optimisers_and_clipping_give_the_same_numbers(optimizer: str, clip: dict[str, Any]) -> None:
    assert_engines_agree(FedADMM(eta=0.5), model={"optimizer": optimizer}, trainer=clip, tolerance=1e-9)


@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_clipping_of_plain_steps_gives_the_same_numbers(algorithm: str) -> None:
    clip = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": algorithm}
    assert_engines_agree(FedADMM(eta=0.5), trainer=clip)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_clients_that_finish_early_wait_unchanged(optimizer: str) -> None:
    """Epochs of 3, 3, 3, 3 and 4 batches."""
    options = {"local_steps": None, "local_epochs": 2}
    assert_engines_agree(FedADMM(eta=0.5), model={"optimizer": optimizer}, tolerance=1e-9, **options)


def test_cohorts_of_any_size_and_a_learning_rate_that_changes_give_the_same_numbers() -> None:
    assert_engines_agree(FedADMM(eta=0.5), model={"scheduler": "epoch"}, sampler=Bernoulli(0.5), rounds=6)


def test_stacks_are_cut_into_pieces_that_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 2)
    monkeypatch.setattr("lightning_fed.local.stacked.batches.BLOCK_BYTES", 1000)
    assert_engines_agree(FedADMM(eta=0.5))


def test_frozen_parameters_are_shared_and_stay() -> None:
    class Frozen(Smooth):
        def configure_optimizers(self) -> Any:
            self.net[0].requires_grad_(False)
            return torch.optim.SGD([p for p in self.parameters() if p.requires_grad], lr=0.05)

    one_by_one, _ = fit("sequential", FedADMM(), Frozen())
    stacked, trainer = fit("vectorized", FedADMM(), Frozen())
    assert torch.allclose(one_by_one.federation.server.x_bar, stacked.federation.server.x_bar, rtol=0, atol=TOLERANCE)
    assert torch.equal(trainer.lightning_module.net[0].weight, Frozen().net[0].weight)


def test_a_compiler_that_fails_or_errs_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    one_by_one, _ = fit("sequential", FedADMM(), Smooth())

    def refuses(*_: Any) -> Any:
        raise RuntimeError("no compiler")

    def errs(step: Any, *_: Any) -> Any:
        return lambda client, *_: [client[0] + 1e-3]

    for compiler in (refuses, errs):
        monkeypatch.setattr("lightning_fed.local.stacked.recorder.Steps", compiler)
        stacked, _ = fit("vectorized", FedADMM(), Smooth(), compile=True)
        x_bar = one_by_one.federation.server.x_bar
        assert torch.allclose(stacked.federation.server.x_bar, x_bar, rtol=0, atol=TOLERANCE)


def test_a_resumed_run_has_the_bits_of_one_that_was_not_interrupted(tmp_path: Any) -> None:
    straight, _ = fit("vectorized", FedADMM(), Smooth(), rounds=4)

    def saving() -> dict[str, Any]:
        return {"callbacks": [ModelCheckpoint(tmp_path, save_last=True)], "enable_checkpointing": True}

    fit("vectorized", FedADMM(), Smooth(), rounds=2, trainer=saving())
    server = FederatedServer(FedADMM(), engine="vectorized", local_steps=7, seed=3, evaluate_every=0)
    quiet_trainer(server, 4, **saving()).fit(Smooth(), datamodule=data(), ckpt_path=tmp_path / "last.ckpt")
    expected, found = memories(straight), memories(server)
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_a_value_that_changes_between_rounds_is_seen() -> None:
    class Scaled(Smooth):
        factor = 1.0

        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            return self.factor * super().training_step(batch, batch_idx)

    class Changes(FederatedCallback):
        def on_round_start(self, trainer: Any, module: Any, round: int, cohort: Any) -> None:
            module.factor = 1.0 + round

    def run(engine: str) -> Tensor:
        server, _ = fit(engine, FedADMM(), Scaled(), trainer={"callbacks": [Changes()]})
        return server.federation.server.x_bar

    assert torch.allclose(run("vectorized"), run("sequential"), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("optimizer", ["sgd", "adam"])
def test_steps_in_place_touch_neither_questions_nor_earlier_answers(
    optimizer: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Smooth(optimizer=optimizer)
    seen: list[tuple[Tensor | None, Tensor]] = []

    def watched(local: StackedLocal, problem: StackedProblem, plans: Any) -> Answers:
        given = [problem.start, problem.constant]
        before = [None if part is None else part.clone() for part in given]
        answers = solve(local, problem, plans)
        seen.extend((part, kept) for part, kept in zip(given, before, strict=True) if kept is not None)
        seen.append((answers.x, answers.x.clone()))
        return answers

    solve = StackedLocal.solve
    monkeypatch.setattr(StackedLocal, "solve", watched)
    fit("vectorized", FedADMM(eta=0.5), module)
    assert len(seen) == 9
    for tensor, kept in seen:
        torch.testing.assert_close(tensor, kept, rtol=0, atol=0)


def test_a_loss_that_is_divided_by_a_plain_number_is_taken_apart() -> None:
    class Divided(Smooth):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            losses = torch.nn.functional.cross_entropy(self(batch[0]), batch[1], reduction="sum")
            return losses / len(batch[1])

    found, _ = fit("vectorized", FedADMM(), Divided())
    expected, _ = fit("sequential", FedADMM(), Divided())
    assert torch.allclose(found.federation.server.x_bar, expected.federation.server.x_bar, rtol=0, atol=TOLERANCE)


def test_a_parameter_whose_gradient_is_zero_but_for_rounding_is_no_obstacle() -> None:
    class Pairs(Smooth):
        def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor:
            scores = self(batch[0])
            return (scores.unsqueeze(0) - scores.unsqueeze(1)).square().mean()

    found, _ = fit("vectorized", FedADMM(), Pairs())
    expected, _ = fit("sequential", FedADMM(), Pairs())
    assert torch.allclose(found.federation.server.x_bar, expected.federation.server.x_bar, rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("frequent", [0, 10**9], ids=["recorded", "one at a time"])
@pytest.mark.parametrize("batch_size", [4, 11])
@pytest.mark.parametrize(
    ("options", "model"),
    [
        ({"local_steps": 7}, {}),
        ({"local_steps": None, "local_epochs": 2}, {}),
        ({"local_steps": None, "local_epochs": 2, "compile": True}, {}),
        ({"local_steps": None, "local_epochs": 2}, {"optimizer": "adam"}),
    ],
    ids=["steps", "epochs", "epochs in C", "epochs of Adam"],
)
def test_short_batches_give_the_same_numbers_however_they_are_computed(
    frequent: float, batch_size: int, options: Any, model: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("lightning_fed.engines.selection.FREQUENT", frequent)
    monkeypatch.setattr("stacks.data", lambda: data(batch_size=batch_size))
    assert_engines_agree(FedADMM(eta=0.5), model=model, tolerance=1e-9 if model else TOLERANCE, **options)


def test_auto_leaves_clients_one_by_one_whose_batches_all_have_sizes_of_their_own(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Declared(Smooth):
        stackable = True

    monkeypatch.setattr("stacks.data", lambda: data(batch_size=100))
    fit("auto", FedADMM(), Declared())
    assert any("most batches have sizes that few others have" in text for text in caplog.messages)
