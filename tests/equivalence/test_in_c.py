"""Clients whose steps are written in C end where clients trained one by one end."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from helpers.c_steps import needs_compiler
from helpers.modules import Net
from helpers.problems import every_algorithm
from helpers.stacks import TOLERANCE, Smooth, assert_engines_agree, fit, memories
from torch import Tensor, nn

from lightning_fed.algorithms import Algorithm, FedADMM, FedAvg, FedDR
from lightning_fed.local.native.codegen.operators import EVERY
from lightning_fed.local.native.codegen.program import Steps
from lightning_fed.sampling import Bernoulli


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


@needs_compiler
@every_algorithm
def test_every_algorithm_gives_the_same_numbers(algorithm: Algorithm) -> None:
    assert_engines_agree(algorithm, clients_per_round=None if algorithm.everybody else 3, compile=True)


@needs_compiler
@pytest.mark.parametrize("algorithm", [FedADMM(), FedDR(), FedAvg()], ids=lambda algorithm: type(algorithm).__name__)
def test_plain_steps_are_written_in_c(algorithm: Algorithm, calls: list[int]) -> None:
    assert_engines_agree(algorithm, clients_per_round=3, rounds=4, compile=True)
    assert calls.count(3) >= 4  # once for the comparison, and once in every round


@needs_compiler
@pytest.mark.parametrize(
    "options",
    [
        {"local_steps": None, "local_epochs": 2},
        {"sampler": Bernoulli(0.5), "rounds": 6, "model": {"scheduler": "epoch"}},
        {"trainer": {"gradient_clip_val": 0.05}},
        {"trainer": {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "value"}},
    ],
    ids=["uneven", "learning rate", "clip by norm", "clip by value"],
)
def test_all_settings_give_the_same_numbers(options: dict[str, Any], calls: list[int]) -> None:
    assert_engines_agree(FedADMM(eta=0.5), compile=True, **options)
    assert calls


@needs_compiler
def test_workers_are_threads_and_change_no_bit(calls: list[int]) -> None:
    ends = [fit("vectorized", FedADMM(), Smooth(), compile=True, workers=workers)[0] for workers in (1, 2)]
    assert calls
    first, second = map(memories, ends)
    assert all(torch.equal(first[name], second[name]) for name in first)


@needs_compiler
def test_blocks_follow_each_other(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setattr("lightning_fed.engines.vectorized.STACK", 2)
    monkeypatch.setattr("lightning_fed.local.stacked.batches.BLOCK_BYTES", 1000)
    assert_engines_agree(FedADMM(eta=0.5), compile=True)
    assert len(calls) > 9


@needs_compiler
@pytest.mark.parametrize(
    "layers",
    [
        [nn.Linear(6, 9), nn.ReLU(), nn.Linear(9, 6), nn.Sigmoid(), nn.Linear(6, 3)],
        [nn.Linear(6, 5), nn.LayerNorm(5), nn.GELU(), nn.Linear(5, 3)],
        [nn.Linear(6, 5, bias=False), nn.LeakyReLU(0.2), nn.Linear(5, 3), nn.Softplus(), nn.Hardtanh()],
        [nn.Linear(6, 5), nn.SiLU(), nn.Linear(5, 3), nn.ELU()],
    ],
    ids=["relu", "layer norm", "leaky", "silu"],
)
def test_other_networks_give_the_same_numbers(layers: list[nn.Module], calls: list[int]) -> None:
    class Other(Smooth):
        def __init__(self) -> None:
            super().__init__()
            self.net = nn.Sequential(*layers).double()

    start = {name: value.clone() for name, value in Other().state_dict().items()}
    ends = []
    for engine, compile_ in (("sequential", False), ("vectorized", True)):
        module = Other()
        module.load_state_dict(start)
        server, _ = fit(engine, FedADMM(), module, compile=compile_)
        assert server.federation is not None
        ends.append(server.federation.server.x_bar.clone())
    assert calls
    assert torch.allclose(*ends, rtol=0, atol=TOLERANCE)


@needs_compiler
def test_what_cannot_be_written_in_c_is_trained_otherwise(calls: list[int], caplog: pytest.LogCaptureFixture) -> None:
    class Sorting(Net):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x.cumsum(1)) + self.net[0].weight.flatten().sort().values[:3]

    caplog.set_level("INFO", logger="lightning_fed")
    found, _ = fit("vectorized", FedADMM(), Sorting().double(), compile=True)
    expected, _ = fit("sequential", FedADMM(), Sorting().double())
    assert not calls
    assert "Local steps are not written in C: NoCodeError: there is none for aten.sort" in caplog.text
    assert torch.allclose(found.federation.server.x_bar, expected.federation.server.x_bar, rtol=0, atol=TOLERANCE)


@needs_compiler
def test_code_that_errs_is_not_used(monkeypatch: pytest.MonkeyPatch, calls: list[int]) -> None:
    monkeypatch.setitem(EVERY, torch.ops.aten.exp, "FN(exp)({0}) + 1e-3")
    monkeypatch.setattr("torch._inductor.compile", lambda *_: None)
    assert_engines_agree(FedADMM(eta=0.5), compile=True)
    assert len(calls) == 1  # the comparison
