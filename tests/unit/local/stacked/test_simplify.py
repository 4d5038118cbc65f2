"""Recorded graphs lose what does nothing, and nothing else."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.fx import GraphModule
from torch.fx.experimental.proxy_tensor import make_fx

from lightning_fed.local.stacked import simplify
from lightning_fed.local.stacked.simplify import bound, is_pure, operators, simplified

X, Y = torch.randn(4, 1, 3, generator=torch.Generator().manual_seed(0)), torch.arange(12.0).view(4, 3)

CASES: dict[str, tuple[Callable[..., Tensor], int, str]] = {
    "views that change nothing": (lambda x, y: x.expand(4, 1, 3).view(4, 1, 3).relu(), 1, "drop_identities"),
    "copies": (lambda x, y: x.clone().relu(), 1, "drop_identities"),
    "products with 1": (lambda x, y: (x * 1).relu(), 1, "drop_factors"),
    "constants": (lambda x, y: x + torch.full((3,), 2.0).exp(), 1, "fold_constants"),
    "constants of a shape": (lambda x, y: torch.cat([y, torch.zeros_like(y)]), 1, "fold_constants"),
}


def record(function: Callable[..., Any]) -> GraphModule:
    return make_fx(lambda x, y: (function(x, y),))(X, Y)


@pytest.mark.parametrize("name", CASES)
def test_a_pass_removes_what_it_should_and_keeps_the_numbers(name: str) -> None:
    function, left, a_pass = CASES[name]
    recorded = record(function)
    getattr(simplify, a_pass)(recorded)
    recorded.graph.eliminate_dead_code()
    recorded.recompile()
    targets = [node.target for node in operators(recorded.graph)]
    assert len(targets) == left
    assert targets != [node.target for node in operators(record(function).graph)]
    x, y = torch.randn(4, 1, 3), torch.randn(4, 3)
    torch.testing.assert_close(recorded(x, y), (function(x, y),), rtol=0, atol=0)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, y: y.transpose(0, 1).reshape(4, 3),  # the same shape, other numbers
        lambda x, y: y.sum(1, keepdim=True).expand(4, 3) * torch.ones_like(x).sum(),
        lambda x, y: torch.ones(4, 1, 1) * y.unsqueeze(1) * torch.ones(2, 1),  # ones that make it larger
        lambda x, y: y.double().float() * 1.0 + (y > 1) * 1,
        lambda x, y: torch.nn.functional.layer_norm(y, [3]) + torch.full((3,), 2) / 4,
        lambda x, y: (y + 1) - (y + 1.0) + y.view(12)[1:].sum(),
        lambda x, y: y[1:] + y[:-1],
    ],
)
def test_all_passes_together_keep_the_numbers(function: Callable[..., Tensor]) -> None:
    whole = simplified(record(function), [X, Y])
    x, y = torch.randn(4, 1, 3), torch.randn(4, 3)
    for found in (whole(x, y)[0], bound(whole)(x, y)[0]):
        torch.testing.assert_close(found, function(x, y), rtol=0, atol=0)


@pytest.mark.parametrize("function", [lambda x, y: y.clone().add_(1), lambda x, y: y + torch.rand(3)])
def test_what_writes_or_draws_is_not_pure(function: Callable[..., Tensor]) -> None:
    assert not is_pure(record(function).graph)
