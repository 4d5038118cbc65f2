"""A step in parts gives what it gives as a whole, and only what it has to is done in every step."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_fed.local.stacked.phases import Parts
from lightning_fed.local.stacked.recorder import Graphs
from lightning_fed.local.stacked.simplify import operators

STEPS, M, D = 5, 3, 4


def regression(p: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
    """Gradient, losses, and two things that are logged: one of them a parameter."""
    target = (y * scale).exp()
    error = (p * x).sum(1) - target
    return error.unsqueeze(1) * x, error.square() / 2, p[:, :1].detach(), target


def run(parts: Parts, params: Tensor, shared: Sequence[Tensor], data: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    """Gradient steps in place; the parameters and the other results of all steps."""
    prepared = parts.before(shared, data)
    views, left = parts.views(params), []
    for own in zip(*parts.fed(prepared), strict=True):
        gradient, *rest = parts.step(*views, *shared, *own)
        params.sub_(gradient, alpha=0.1)
        left.append(rest)
    stacked = [torch.stack(pieces) for pieces in zip(*left, strict=True)]
    return params, parts.after(stacked, shared, prepared)


def example() -> tuple[Tensor, list[Tensor], list[Tensor]]:
    torch.manual_seed(0)
    return torch.randn(M, D), [torch.tensor(0.5)], [torch.randn(STEPS, M, D), torch.randn(STEPS, M)]


def taken_apart(function: Callable[..., Any]) -> Parts:
    params, shared, data = example()
    return Graphs().parts(function, [params], shared, [part[0] for part in data])


def test_steps_in_parts_give_what_whole_steps_give() -> None:
    params, shared, data = example()
    expected, wholes = params.clone(), []
    for own in zip(*data, strict=True):
        gradient, *rest = (part.clone() for part in regression(expected, *shared, *own))
        expected.sub_(gradient, alpha=0.1)
        wholes.append(rest)
    found, results = run(taken_apart(regression), params, shared, data)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(results, [torch.stack(pieces) for pieces in zip(*wholes, strict=True)])


def test_a_whole_step_gives_what_the_function_gives() -> None:
    params, shared, data = example()
    own = [part[0] for part in data]
    torch.testing.assert_close(taken_apart(regression).whole(params, *shared, *own), regression(params, *shared, *own))


def test_only_what_the_next_step_needs_is_done_in_every_step() -> None:
    targets = {str(node.target) for node in operators(taken_apart(regression).core.graph)}
    assert "aten.exp.default" not in targets  # data alone
    assert not {"aten.pow.Tensor_Scalar", "aten.div.Tensor"} & targets  # the loss alone
    assert "aten.sum.dim_IntList" in targets


def test_what_would_take_much_memory_is_done_in_every_step() -> None:
    def wide(p: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        large = y.unsqueeze(1).expand(M, 10_000).exp()
        return p * x * large.sum(1, keepdim=True), (p.sum(1, keepdim=True) * large).sin().sum(1)

    assert {"aten.exp.default", "aten.sin.default"} <= {str(n.target) for n in operators(taken_apart(wide).core.graph)}


def test_what_later_work_sees_of_parameters_is_what_they_were_in_their_step() -> None:
    def logging(p: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        first, second = p.split(2, dim=1)
        return p * x, first.unsqueeze(0).sin().sum((0, 2)), second, p, (second[:, 0] * y).cos()

    params, shared, data = example()
    at, expected = params.clone(), []
    for own in zip(*data, strict=True):
        expected.append([part.clone() for part in logging(at, *shared, *own)[1:]])
        at.sub_(at * own[0], alpha=0.1)
    results = run(taken_apart(logging), params, shared, data)[1]
    torch.testing.assert_close(results, [torch.stack(pieces) for pieces in zip(*expected, strict=True)])


def test_a_second_pass_through_the_parameters_is_no_obstacle() -> None:
    def twice(p: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return p * x, (p * (p * x).tanh()).sum(1) + y

    params, shared, data = example()
    expected, losses = params.clone(), []
    for own in zip(*data, strict=True):
        gradient, loss = twice(expected, *shared, *own)
        expected = expected - 0.1 * gradient
        losses.append(loss)
    found, (results,) = run(taken_apart(twice), params, shared, data)
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(results, torch.stack(losses))


@pytest.mark.parametrize("impure", [lambda x: x.clone().add_(1), lambda x: torch.zeros_like(x).copy_(x)])
def test_a_step_that_writes_into_its_own_tensors_is_done_as_a_whole(impure: Callable[[Tensor], Tensor]) -> None:
    def writing(p: Tensor, scale: Tensor, x: Tensor, y: Tensor) -> tuple[Tensor, ...]:
        return p * impure(x), (p * scale).sum(1) + y

    params, shared, data = example()
    expected = params.clone()
    for x, _ in zip(*data, strict=True):
        expected -= 0.1 * expected * impure(x)
    torch.testing.assert_close(run(taken_apart(writing), params, shared, data)[0], expected)


def test_a_gradient_that_needs_no_parameters_is_not_changed_by_steps() -> None:
    params, shared, data = example()
    kept = [part.clone() for part in data]
    found, _ = run(taken_apart(lambda p, scale, x, y: (x, (p * x).sum(1) + y)), params.clone(), shared, data)
    torch.testing.assert_close(found, params - 0.1 * data[0].sum(0))
    assert all(map(torch.equal, data, kept))
