"""Pruning as the example does it: filters that are really zero, and a smaller network that says the same."""

from __future__ import annotations

import runpy
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import wandb
from helpers.wandb_reader import read_run

EXAMPLE = Path(__file__).parents[2] / "examples" / "pruning.py"
EX = SimpleNamespace(**runpy.run_path(str(EXAMPLE)))


@pytest.fixture(autouse=True)
def _finish_wandb() -> Iterator[None]:
    yield
    wandb.finish()


def net_with(zero: dict[str, list[int]]) -> Any:
    """A network in float64 with biases of both signs, and some filters that are zero."""
    net = EX.SmallCNN((4, 6)).double()
    with torch.no_grad():
        for name, filters in zero.items():
            getattr(net, name).weight[filters] = 0.0
            getattr(net, name).bias.copy_(torch.linspace(-1.0, 2.0, len(getattr(net, name).bias)))
    return net


@pytest.mark.parametrize(
    "zero",
    [{"conv1": [0, 2, 3], "conv2": [1, 5]}, {"conv1": [3], "conv2": []}, {"conv1": [], "conv2": [0, 4, 5]}],
    ids=str,
)
def test_without_its_zero_filters_a_network_says_the_same(zero: dict[str, list[int]]) -> None:
    net = net_with(zero)
    pruned = EX.without_zero_filters(net)
    assert pruned.conv1.weight.shape == (4 - len(zero["conv1"]), 1, 5, 5)
    assert pruned.conv2.weight.shape == (6 - len(zero["conv2"]), 4 - len(zero["conv1"]), 5, 5)
    assert pruned.head.weight.shape == (62, (6 - len(zero["conv2"])) * 16)
    x = torch.randn(5, 784, dtype=torch.float64)
    torch.testing.assert_close(pruned(x), net(x), rtol=0, atol=1e-12)
    with torch.no_grad():
        pruned.conv2.bias += 1e-3
    assert not torch.allclose(pruned(x), net(x), rtol=0, atol=1e-6)


def test_filters_that_only_listened_to_removed_ones_go_too() -> None:
    net = net_with({"conv1": [1], "conv2": []})
    with torch.no_grad():
        net.conv2.weight[2, [0, 2, 3]] = 0.0  # it hears nothing but a constant
    pruned = EX.without_zero_filters(net)
    assert len(pruned.conv2.weight) == 5
    x = torch.randn(5, 784, dtype=torch.float64)
    torch.testing.assert_close(pruned(x), net(x), rtol=0, atol=1e-12)


def test_a_network_of_which_nothing_would_be_left_is_refused() -> None:
    with pytest.raises(ValueError, match=r"All 6 filters of conv2 are zero.*Lower --strength"):
        EX.without_zero_filters(net_with({"conv1": [], "conv2": list(range(6))}))


def test_the_example_prunes_what_it_trains(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["pruning.py", "--quick", "--out", "out"])
    EX.main()
    wandb.finish()
    printed = capsys.readouterr().out
    numbers = {line.split()[0]: line.replace(",", "").split()[-2:] for line in printed.splitlines() if line.strip()}
    (before, after), (bytes_before, bytes_after) = (map(int, numbers[name]) for name in ("parameters", "bytes"))
    assert after < before
    assert (bytes_before, bytes_after) == (4 * before, 4 * after)
    assert numbers["accuracy"][0] == numbers["accuracy"][1]
    filters, kept = map(int, numbers["conv2"])
    run = read_run(Path("out"))
    assert list(run.series("sparsity/conv2.weight/filters").values())[-1] == filters - kept > 0
    assert "pruning/figure" in run.summary
    assert "generated handwriting, not FEMNIST" in printed
    assert all((tmp_path / "out" / name).stat().st_size > 10_000 for name in ("pruning.png", "figure.png"))
