"""Orders of samples: test vectors, two implementations, NumPy's own Philox, and what a permutation must be."""

from __future__ import annotations

import re
from itertools import permutations
from pathlib import Path

import numpy as np
import pytest
from helpers.c_steps import needs_compiler

from lightning_fed.core import draws
from lightning_fed.core.draws import batch_key, epoch_orders, philox

DOCS = Path(__file__).parents[3] / "docs" / "draws.md"

#: seed, client, round, epoch, samples; key; first four words; order
VECTORS = [
    (
        (0, "ann", 0, 0, 5),
        ("88c6bcdc34764d9a", "bf5f75b05a84bf80"),
        ("901cd55fbf9635ea", "f31a2292daa47f76", "2808849b0bb7c8c0", "8cd2e88934e5afcb"),
        [4, 2, 3, 0, 1],
    ),
    (
        (42, "f0001_41", 7, 3, 12),
        ("6e6e118d101d8245", "b3abb8a460788716"),
        ("5e47de0b3e548fe9", "92b9572c73d5ff8a", "b8fef5c8140a1d1f", "80371d45ea5e932f"),
        [10, 9, 0, 7, 3, 4, 1, 6, 2, 11, 8, 5],
    ),
    (
        (2**40, -1, 2**33, 1, 5),
        ("8491794f7e04dcb5", "b154b4d434496d04"),
        ("4381c1549d116e28", "b12af538e7419c52", "1124ef86cae77c55", "f19b57a84cdb4fb7"),
        [4, 2, 0, 1, 3],
    ),
]


def word(value: int) -> np.ndarray:
    return np.array([value % 2**64], dtype=np.uint64)


def words(counter: tuple[int, ...], key: tuple[int, ...]) -> list[int]:
    return [int(w[0]) for w in philox([word(c) for c in counter], [word(k) for k in key])]


def by_numpys_philox(seed: int, client: int | str, round: int, epoch: int, n: int) -> list[int]:
    """The order, from NumPy's generator, which counts up before it draws."""
    low, high = batch_key(seed, client)
    start = (round << 128) + (epoch << 64) - 1
    drawn = np.random.Philox(counter=start % 2**256, key=low + (high << 64)).random_raw(4 * -(-n // 4))
    return sorted(range(n), key=lambda i: int(drawn[i]))


@pytest.mark.parametrize(("case", "key", "first", "order"), VECTORS)
def test_vectors(case: tuple, key: tuple, first: tuple, order: list[int]) -> None:
    seed, client, round, epoch, n = case
    assert batch_key(seed, client) == tuple(int(part, 16) for part in key)
    assert words((0, epoch, round, 0), batch_key(seed, client)) == [int(part, 16) for part in first]
    assert epoch_orders(seed, round, [client], [n], [epoch + 1])[0][epoch].tolist() == order
    assert by_numpys_philox(*case) == order


def test_the_documentation_has_the_same_vectors() -> None:
    rows = [line for line in DOCS.read_text().splitlines() if re.match(r"\| \d", line)]
    assert len(rows) == len(VECTORS)
    for row, (_, key, first, order) in zip(rows, VECTORS, strict=True):
        assert re.findall(r"`([0-9a-f]{16})`", row) == [*key, *first]
        assert row.rstrip(" |").endswith(str(order))


def test_philox_is_numpys() -> None:
    random = np.random.default_rng(0)
    for _ in range(50):
        counter = tuple(int(c) for c in random.integers(0, 2**64, 4, dtype=np.uint64))
        key = tuple(int(k) for k in random.integers(0, 2**64, 2, dtype=np.uint64))
        whole = sum(c << (64 * i) for i, c in enumerate(counter))
        numpys = np.random.Philox(counter=(whole - 1) % 2**256, key=key[0] + (key[1] << 64))
        assert words(counter, key) == numpys.random_raw(4).tolist()


@needs_compiler
@pytest.mark.parametrize("seed", range(5))
def test_c_and_numpy_give_the_same_orders(seed: int) -> None:
    random = np.random.default_rng(seed)
    m = int(random.integers(1, 40))
    keys = random.integers(0, 2**64, (m, 2), dtype=np.uint64)
    samples, epochs = random.integers(1, 300, m), random.integers(1, 6, m)
    round = int(random.integers(0, 2**63))
    ours, numpys = (f(keys, round, samples, epochs) for f in (draws._c_orders, draws._numpy_orders))
    assert np.array_equal(ours, numpys)


@pytest.mark.parametrize("way", [pytest.param("_c_orders", marks=needs_compiler), "_numpy_orders"])
def test_every_order_is_a_permutation(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(draws, "_compiled", (lambda: None) if way == "_numpy_orders" else draws._compiled)
    samples, epochs = [1, 2, 3, 4, 5, 8, 9, 1000], [3, 1, 2, 1, 4, 1, 1, 2]
    orders = epoch_orders(1, 2, list("abcdefgh"), samples, epochs)
    for order, n, count in zip(orders, samples, epochs, strict=True):
        assert order.shape == (count, n)
        assert np.array_equal(np.sort(order, axis=1), np.tile(np.arange(n), (count, 1)))


def test_a_client_is_drawn_among_others_as_alone() -> None:
    together = epoch_orders(5, 9, ["a", 1, "1", "b"], [7, 7, 7, 30], [2, 1, 1, 3])
    for client, n, count, order in zip(["a", 1, "1", "b"], [7, 7, 7, 30], [2, 1, 1, 3], together, strict=True):
        assert np.array_equal(epoch_orders(5, 9, [client], [n], [count])[0], order)


def test_another_seed_round_client_or_epoch_gives_another_order() -> None:
    cases = [(seed, round, client) for seed in (0, 1) for round in (-1, 0, 1) for client in (0, "0", 1)]
    orders = [tuple(order) for case in cases for order in epoch_orders(case[0], case[1], [case[2]], [50], [2])[0]]
    assert len(set(orders)) == len(orders) == 2 * len(cases)


def test_all_orders_are_equally_likely() -> None:
    """Chi-square with 23 degrees of freedom: 49.7 is passed by one in a thousand."""
    rounds = 4800
    found = [tuple(epoch_orders(0, k, ["a"], [4], [1])[0][0]) for k in range(rounds)]
    expected = rounds / 24
    assert sum((found.count(order) - expected) ** 2 / expected for order in permutations(range(4))) < 49.7
