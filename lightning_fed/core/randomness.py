"""Derive all randomness from keys such as (seed, round, client, local epoch), never from earlier draws."""

from __future__ import annotations

import random
from functools import cache
from hashlib import sha256
from operator import index

import numpy as np
import torch


def derive_seed(*key: int | str) -> int:
    """A 63-bit seed from a key; unlike keys give unrelated seeds.

    >>> derive_seed(0, 1, "client") == derive_seed(0, 1, "client")
    True
    >>> derive_seed(0, 11) == derive_seed(0, 1, 1)
    False
    """
    return _seed(repr(plain_key(key)).encode())


def plain_key(key: tuple[int | str, ...]) -> tuple[int | str, ...]:
    """Convert the key's integers to Python integers: the key's text is hashed, and numpy integers print otherwise."""
    return tuple(part if isinstance(part, str) else index(part) for part in key)


def _seed(text: bytes) -> int:
    return int.from_bytes(sha256(text).digest()[:8], "big") >> 1


def numpy_generator(*key: int | str) -> np.random.Generator:
    return np.random.default_rng(derive_seed(*key))


def torch_generator(*key: int | str) -> torch.Generator:
    return torch.Generator().manual_seed(derive_seed(*key))


@cache
def _has_accelerator() -> bool:
    return torch.accelerator.is_available()


def seed_global(*key: int | str) -> None:
    """Seed torch (all devices), numpy and random, so that a module's next draws are a function of ``key``."""
    seed = derive_seed(*key)
    if _has_accelerator():
        torch.manual_seed(seed)
    else:  # torch.manual_seed would queue a call with a stack trace for a CUDA start that never comes; that is slow
        torch.default_generator.manual_seed(seed)
    np.random.seed(seed % 2**32)
    random.seed(seed)
