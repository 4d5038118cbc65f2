"""The order of every client's samples in each local epoch, drawn for many clients at once.

An order is the stable argsort of 64-bit words of Philox4x64-10, a random function of a key and a counter: a draw
depends neither on earlier draws nor on the machine. docs/draws.md has the layout and test vectors.
"""

from __future__ import annotations

import ctypes
import logging
from collections.abc import Sequence
from functools import cache, lru_cache
from hashlib import sha256
from importlib.resources import files
from subprocess import SubprocessError
from typing import Any

import numpy as np
from numpy.typing import NDArray

from lightning_fed.core.compiler import built
from lightning_fed.core.randomness import plain_key

log = logging.getLogger(__name__)

Words = NDArray[np.uint64]
Orders = NDArray[np.int64]

_MULTIPLIERS = 0xD2E7470EE14C6C93, 0xCA5A826395121157
_BUMPS = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_LOW = np.uint64(0xFFFFFFFF)
_HALF = np.uint64(32)


def philox(counter: Sequence[Words], key: Sequence[Words]) -> list[Words]:
    """The four words of Philox4x64-10 for each counter (four arrays) and key (two arrays).

    >>> zero = np.zeros(1, dtype=np.uint64)
    >>> [hex(int(word[0])) for word in philox([zero] * 4, [zero] * 2)]
    ['0x16554d9eca36314c', '0xdb20fe9d672d0fdc', '0xd7e772cee186176b', '0x7e68b68aec7ba23b']
    """
    a, b, c, d = counter
    k0, k1 = key
    for _ in range(10):
        (high0, low0), (high1, low1) = _product(_MULTIPLIERS[0], a), _product(_MULTIPLIERS[1], c)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0, k1 = k0 + np.uint64(_BUMPS[0]), k1 + np.uint64(_BUMPS[1])
    return [a, b, c, d]


def _product(factor: int, words: Words) -> tuple[Words, Words]:
    """The high and the low 64 bits of a product; from 32-bit halves, because numpy has no 128-bit integers."""
    low, high = np.uint64(factor & 0xFFFFFFFF), np.uint64(factor >> 32)
    right, left = words & _LOW, words >> _HALF
    cross, other = low * left, high * right
    middle = (low * right >> _HALF) + (cross & _LOW) + (other & _LOW)
    return high * left + (cross >> _HALF) + (other >> _HALF) + (middle >> _HALF), np.uint64(factor) * words


@lru_cache(maxsize=2**16)
def batch_key(seed: int, client: int | str) -> tuple[int, int]:
    """The key of a client's batches: the first two big-endian words of SHA-256 of ``(seed, client, 'batches')``."""
    digest = sha256(repr(plain_key((seed, client, "batches"))).encode()).digest()
    return int.from_bytes(digest[:8], "big"), int.from_bytes(digest[8:16], "big")


def epoch_orders(
    seed: int, round: int, clients: Sequence[int | str], samples: Sequence[int], epochs: Sequence[int]
) -> list[Orders]:
    """The orders (epochs, samples) of each client's first local epochs in a round.

    Word ``i`` of an epoch is word ``i % 4`` of Philox for the counter ``(i // 4, epoch, round, 0)``.

    >>> epoch_orders(0, 0, ["ann"], [5], [2])[0].tolist()
    [[4, 2, 3, 0, 1], [4, 2, 0, 3, 1]]
    """
    keys = np.array([batch_key(seed, cid) for cid in clients], dtype=np.uint64)
    n, e = np.array(samples, dtype=np.int64), np.array(epochs, dtype=np.int64)
    flat = (_numpy_orders if _compiled() is None else _c_orders)(keys, round % 2**64, n, e)
    if len(set(samples)) == len(set(epochs)) == 1:
        return list(flat.reshape(len(clients), epochs[0], samples[0]))
    pieces = np.split(flat, np.cumsum(n * e)[:-1])
    return [piece.reshape(count, -1) for piece, count in zip(pieces, epochs, strict=True)]


def _c_orders(keys: Words, round: int, samples: Orders, epochs: Orders) -> Orders:
    orders = np.empty(int((samples * epochs).sum()), dtype=np.int64)
    room = np.empty(3 * int(samples.max()) + 5, dtype=np.uint64)
    at = [array.ctypes.data for array in (keys, samples, epochs, orders, room)]
    _compiled()(at[0], round, at[1], at[2], len(keys), at[3], at[4])
    return orders


def _numpy_orders(keys: Words, round: int, samples: Orders, epochs: Orders) -> Orders:
    blocks = -(-samples // 4)
    owner = np.repeat(np.arange(len(keys)), blocks * epochs)
    place = np.arange(len(owner)) - np.repeat(np.cumsum(blocks * epochs) - blocks * epochs, blocks * epochs)
    epoch, block = np.divmod(place, blocks[owner])
    fixed = [np.full(len(owner), value, dtype=np.uint64) for value in (round, 0)]
    words = np.stack(philox([block.astype(np.uint64), epoch.astype(np.uint64), *fixed], list(keys[owner].T)), axis=1)
    pieces = np.split(words.reshape(-1), np.cumsum(4 * blocks * epochs)[:-1])
    return np.concatenate(
        [
            np.argsort(piece.reshape(e, -1)[:, :n], axis=1, kind="stable").reshape(-1)
            for piece, n, e in zip(pieces, samples, epochs, strict=True)
        ]
    )


@cache
def _compiled() -> Any:
    """Build the C function that computes the same orders, or load it; None if there is no compiler that works."""
    source = files("lightning_fed.core").joinpath("draws.c").read_text(encoding="utf-8")
    try:
        function = built(source, portable=True).epoch_orders
    except (OSError, SubprocessError, AttributeError) as error:
        log.info("Batches are drawn by NumPy, not in C: %s", error)
        return None
    address, number = ctypes.c_void_p, ctypes.c_int64
    function.argtypes = [address, ctypes.c_uint64, address, address, number, address, address]
    function.restype = None
    return function
