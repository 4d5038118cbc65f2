"""One tree of sums, however messages come together."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from lightning_fed.core.records import record
from lightning_fed.core.summation import TreeSum


@record
class Pair:
    a: Tensor
    b: Tensor


def by_the_definition(rows: list[Tensor]) -> Tensor:
    """Neighbours are added, level by level; the last one without a partner moves up."""
    while len(rows) > 1:
        paired = [a + b for a, b in zip(rows[::2], rows[1::2], strict=False)]
        rows = paired + rows[2 * len(paired) :]
    return rows[0]


def messages(n: int, dtype: torch.dtype = torch.float64) -> Tensor:
    noise = torch.Generator().manual_seed(n)
    return torch.randn(n, 3, generator=noise, dtype=dtype) * 10.0 ** torch.randint(-9, 9, (n, 1), generator=noise)


@pytest.mark.parametrize("n", [1, 2, 3, 4, 5, 7, 8, 9, 31, 72, 128, 200])
@pytest.mark.parametrize("size", [1, 2, 3, 5, 8, 64, 128])
def test_parts_of_any_size_give_the_bits_of_the_tree(n: int, size: int) -> None:
    rows, weights = messages(n), [0.1 + i % 7 for i in range(n)]
    total = TreeSum()
    for first in range(0, n, size):
        total.add(Pair(rows[first : first + size], rows[first : first + size, 0]), weights[first : first + size])
    expected = by_the_definition([row * weight for row, weight in zip(rows, weights, strict=True)])
    assert torch.equal(total.value().a, expected)
    assert torch.equal(total.value().b, expected[0])


def test_sums_are_kept_in_float64() -> None:
    rows, total = messages(50, torch.float32), TreeSum()
    total.add(rows, [1.0] * 50)
    assert total.value().dtype == torch.float64
    assert torch.equal(total.value(), by_the_definition(list(rows.double())))


@pytest.mark.parametrize("size", [1, 2, 4, 9])
def test_a_message_without_a_weight_counts_as_zero_even_if_it_is_not_a_number(size: int) -> None:
    rows = messages(9)
    bad = rows.clone()
    bad[3], bad[6], rows[3], rows[6] = float("nan"), float("inf"), 0.0, 0.0
    weights = [None if i in (3, 6) else 1.0 for i in range(9)]
    total = TreeSum()
    for first in range(0, 9, size):
        total.add(bad[first : first + size], weights[first : first + size])
    assert torch.equal(total.value(), by_the_definition(list(rows)))


def test_messages_are_not_changed() -> None:
    rows = messages(6)
    before, total = rows.clone(), TreeSum()
    for row in rows:
        total.add(row.unsqueeze(0), [1.0])
    total.value()
    assert torch.equal(rows, before)
