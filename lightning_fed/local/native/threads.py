"""Work in C, which needs no interpreter, on all of torch's threads."""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor, wait
from functools import cache

import torch


def spread(work: Callable[[int, int], None], size: int, share: int = 1, least: int = 1) -> None:
    """Parts of the work, multiples of a share, for torch's threads or at ``least`` so many: no result depends on it."""
    threads = max(least, torch.get_num_threads())
    part = -(-size // (threads * share)) * share
    if part >= size:
        return work(0, size)
    parts = [(first, min(first + part, size)) for first in range(0, size, part)]
    doing = [_pool(os.getpid(), threads).submit(work, *part) for part in parts]
    try:
        for each in doing:
            each.result()
    finally:
        wait(doing)  # an interrupt must not take away the memory they work on


@cache
def _pool(process: int, threads: int) -> ThreadPoolExecutor:
    """Threads of this process: a fork has none of its parent's."""
    return ThreadPoolExecutor(threads)
